"""The files of docs/extending.md, in a folder outside the repository: nothing here is edited."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

DOCUMENT = ROOT / "docs" / "extending.md"


def files() -> dict[str, str]:
    """The Python files that the document shows, by module."""
    blocks = re.findall(r"```python\n# outer/(\w+)\.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 5
    return dict(blocks)


Folder = tuple[Path, dict[str, str]]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder with the files of the document, and the environment that makes them known."""
    folder = tmp_path_factory.mktemp("outside")
    package = folder / "outer"
    package.mkdir()
    for name, text in files().items():
        (package / f"{name}.py").write_text(text)
    plugins = ",".join(f"outer.{name}" for name in files())
    return folder, environment(folder, plugins)


def environment(folder: Path, plugins: str) -> dict[str, str]:
    paths = os.pathsep.join((str(folder), str(ROOT)))
    return {**os.environ, "PYTHONPATH": paths, "ATTNBENCH_PLUGINS": plugins}


def attnbench(outside: Folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder, variables = outside
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def trained(outside: Folder) -> Path:
    """The sweep folder of a training step with the backend and the strategy."""
    return run(
        outside,
        *("task=train_step", "model=tiny", "seq_len=32", "batch_size=1"),
        *("attention=naive,outer_naive", "parallel=none,outer_plain"),
        *("task.warmup_steps=1", "task.measure_steps=2"),
        results="trained",
    )


@pytest.fixture(scope="module")
def sorted_numbers(outside: Folder) -> Path:
    return run(outside, "task=sorting", "task.count=1000,2000", results="sorted")


def run(outside: Folder, *arguments: str, results: str) -> Path:
    done = attnbench(outside, *arguments, "device=cpu", f"results={results}")
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = (outside[0] / results).glob("sweeps/*/plan.json")
    return plan.parent


class TestOfEachKindOne:
    def test_backend_and_strategy_stand_in_tables(self, trained: Path) -> None:
        text = (trained / "tables" / "cases.csv").read_text()
        assert text.count("outer_naive") >= 2
        assert text.count("outer_plain") >= 2

    def test_backend_is_compared_and_has_its_place(self, trained: Path) -> None:
        lines = (trained / "tables" / "comparison.csv").read_text().splitlines()
        assert any("outer_naive" in line and "naive" in line for line in lines[1:])

    def test_backend_has_its_colour_in_every_figure(self, trained: Path) -> None:
        figures = trained / "figures"
        assert "#12ab34" in (figures / "tinted.svg").read_text().lower()
        caption = "Backends: naive, outer_naive."
        assert caption in (trained / "report.md").read_text()

    def test_figure_takes_its_place_among_the_defaults(self, trained: Path) -> None:
        plan = json.loads((trained / "plan.json").read_text())
        assert plan["figures"][:2] == ["tinted", "step_time"]
        assert plan["tables"][7:10] == ["cases", "host_time", "sorted"]

    def test_columns_of_the_task(self, sorted_numbers: Path) -> None:
        header, *rows = (sorted_numbers / "tables" / "sorted.csv").read_text().splitlines()
        names = header.split(",")
        assert names.index("count") == names.index("seq_len") + 1
        assert [row.split(",")[names.index("count")] for row in rows] == ["1000", "2000"]
        shown = (sorted_numbers / "tables" / "sorted.md").read_text()
        assert "numbers" in shown
        assert "2,000" in shown

    def test_results_of_the_task_stand_in_the_table_of_all_cases(
        self, sorted_numbers: Path
    ) -> None:
        assert "largest number" in (sorted_numbers / "tables" / "cases.md").read_text()

    def test_phases_of_the_task_are_in_its_order(self, sorted_numbers: Path) -> None:
        header, *rows = (sorted_numbers / "tables" / "cases.csv").read_text().splitlines()
        place = header.split(",").index("phase")
        assert [row.split(",")[place] for row in rows] == ["draw", "sort"] * 2

    def test_finding_is_in_the_write_up(self, outside: Folder, sorted_numbers: Path) -> None:
        results = sorted_numbers.parents[1]
        code = "from harness.commands.writeup import main; import sys; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, str(results)],
            env=outside[1],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        pages = [path.read_text() for path in results.glob("writeup/*.md")]
        assert any("Sorting takes its time" in page for page in pages)


class TestCommandLine:
    def test_plan_and_records_name_the_plugins(self, outside: Folder, trained: Path) -> None:
        file = str(outside[0] / "outer" / "backend.py")
        plan = json.loads((trained / "plan.json").read_text())
        assert plan["plugins"]["attention=outer_naive"] == ["outer.backend", file]
        assert plan["plugins"]["figure=tinted"][0] == "outer.tinted_figure"
        assert "attention=naive" not in plan["plugins"]
        (path, *_) = (trained.parents[1] / "records").glob("*outer_naive*.json")
        record = json.loads(path.read_text())
        assert record["environment"]["plugins"]["outer.backend"] == file
        assert record["source"]["outside/outer"]
        assert "kernels/backends" in record["source"]  # It inherits from naive.

    @pytest.mark.parametrize("command", ["report", "writeup"])
    def test_without_a_plugin_one_line_says_which(
        self, command: str, outside: Folder, trained: Path
    ) -> None:
        results = str(trained.parents[1])
        done = subprocess.run(
            [sys.executable, "-m", f"harness.commands.{command}", results],
            cwd=outside[0],
            env=environment(outside[0], ""),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "parallel=outer_plain: comes from " in line
        assert f"outer.scheme (loaded from {outside[0] / 'outer' / 'scheme.py'})" in line
        assert line.endswith("name it in ATTNBENCH_PLUGINS")

    def test_help_lists_them(self, outside: Folder) -> None:
        found = attnbench(outside, "--help").stdout
        for name in ("outer_naive", "outer_plain", "sorting"):
            assert name in found

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["attention=outer"], "outer_naive"),
            (["parallel=outer"], "outer_plain"),
            (["task=sort"], "sorting"),
            (["task=sorting", "task.count=1"], "task.count=1: must be at least 2"),
        ],
    )
    def test_errors_know_them(self, outside: Folder, arguments: list[str], words: str) -> None:
        done = attnbench(outside, *arguments, "plan=true", "device=cpu")
        assert done.returncode != 0
        assert words in done.stdout + done.stderr


def test_a_function_is_no_backend(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "from kernels.backend import attention_backend\n"
        "@attention_backend('mine')\n"
        "def mine(q, k, v):\n    return q\n"
    )
    outside = (tmp_path, environment(tmp_path, "plain"))
    done = attnbench(outside, "attention=mine", "model=tiny", "device=cpu", "plan=true")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("attnbench: attention=mine: plain registers what cannot be made")


MANY = 12

MANY_CHOICES = f"""
from dataclasses import dataclass

from kernels.backend import attention_backend
from kernels.backends.naive import Naive
from parallel.strategies.strategy import Strategy, strategy

for number in range({MANY}):
    attention_backend(f"many_{{number}}")(dataclass(kw_only=True, slots=True)(
        type("Many", (Naive,), {{"__module__": __name__}})
    ))
    strategy(f"many_{{number}}_ranks")(dataclass(kw_only=True, slots=True)(
        type("ManyRanks", (Strategy,), {{"__module__": __name__}})
    ))
"""

LOOKS = """
import json
from harness.render.palette import colour, marker
from parallel import BACKENDS, STRATEGIES

for kind in (BACKENDS, STRATEGIES):
    print(json.dumps([[colour(name), marker(name)] for name in kind.names()]))
"""


def test_markers_do_not_run_out(tmp_path: Path) -> None:
    """Choices that declare no look differ from each other, and from those that do."""
    (tmp_path / "many.py").write_text(MANY_CHOICES)
    done = subprocess.run(
        [sys.executable, "-c", LOOKS],
        env=environment(tmp_path, "many"),
        capture_output=True,
        text=True,
        check=True,
    )
    backends, strategies = map(json.loads, done.stdout.splitlines())
    for looks in (backends, strategies):
        assert len(looks) >= 2 * MANY
        assert len(set(map(tuple, looks))) == len(looks)
