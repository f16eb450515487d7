"""Commands and hints in messages to users: they run as printed, for one case or many."""

from __future__ import annotations

import io
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, Command
from records import decode_examples, make_decode_record, make_record, write_plan
from rich.console import Console

from harness import load
from harness.cases import format as fmt
from harness.cases.columns import POINTS
from harness.commands import attnbench as cli
from harness.commands.status import look
from harness.render.figure import draw
from harness.render.files import render_sweep, render_terminal
from harness.render.report import measurement_facts, template
from harness.render.table import Column, Table, build_table, finding_of
from harness.request import session
from harness.request.compose import compose_request
from harness.request.plan import plan_cases
from harness.store.attempts import Records
from harness.store.record import Record, RecordStore
from harness.store.sweep_plan import command_into
from harness.writeup.collecting import collect


def write_folder(folder: Path, label: str, records: list[Record], **plan: list[str]) -> Path:
    store = RecordStore(folder)
    store.create()
    for record in records:
        store.write(record)
    write_plan(folder, label, records, tables=["cases"], **plan)
    return folder


def counted_record() -> Record:
    return next(item for item in decode_examples() if "kv_memory" in item.notes)


class TestCommandInto:
    @pytest.mark.parametrize(
        ("command", "into"),
        [
            ("attnbench sweeps=x", "attnbench sweeps=x results=a/b"),
            ("attnbench results=results/local sweeps=x", "attnbench results=a/b sweeps=x"),
            ("attnbench 'task.name=[a b]'", "attnbench 'task.name=[a b]' results=a/b"),
        ],
    )
    def test_names_the_folder_once(self, command: str, into: str) -> None:
        assert command_into(command, Path("a/b")) == into

    def test_sets_what_is_there_already(self) -> None:
        command = "attnbench retry=false sweeps=x"
        assert (
            command_into(command, Path("r"), retry="true")
            == "attnbench retry=true sweeps=x results=r"
        )

    @pytest.mark.parametrize("name", ["results_50%", "my results", "it's", "a,b", "x=y", "(old)"])
    def test_is_taken_by_the_command_line(self, name: str, tmp_path: Path) -> None:
        words = shlex.split(command_into("attnbench sweeps=kv_memory device=cpu", tmp_path / name))
        assert compose_request(words[1:]).options.results == tmp_path / name


class TestGaps:
    def test_measured_sweeps_go_where_a_gpu_has_measured(self, tmp_path: Path) -> None:
        on_cpu = make_record(attention="naive", samples_ms={"step": [[1.0]]})
        on_cpu.case["device"] = "cpu"
        laptop = write_folder(tmp_path / "laptop", "steps", [on_cpu])
        gpu = write_folder(
            tmp_path / "gpu",
            "steps",
            [make_record(attention="naive", samples_ms={"step": [[1.0]]})],
        )
        commands = {gap.what.split(":")[0]: gap for gap in collect([laptop, gpu]).gaps}
        assert commands["nsys_profile"].command == (
            f"attnbench sweeps=nsys_profile results={gpu} device=cuda"
        )
        # Counted: no device is asked for.
        assert commands["kv_memory"].command == f"attnbench sweeps=kv_memory results={laptop}"
        alone = {gap.what.split(":")[0]: gap for gap in collect([laptop]).gaps}
        assert "in full on a GPU, into a folder of its own" in alone["nsys_profile"].what
        assert alone["nsys_profile"].command.endswith(f"results={laptop}")
        assert alone["kv_memory"].what == "kv_memory: not run"

    def test_broken_cases_are_measured_again_in_their_folder(self, tmp_path: Path) -> None:
        broken = make_record(attention="naive", status="failed", message="it broke")
        folder = write_folder(tmp_path / "gpu", "steps", [broken])
        (gap,) = (gap for gap in collect([folder]).gaps if gap.what.startswith("steps"))
        assert gap.what == "steps: 1 case without a result (1 failed)"
        assert gap.command == f"attnbench sweeps=steps results={folder} retry=true"


def test_status_names_the_command_of_a_missing_case(tmp_path: Path) -> None:
    record = make_record(attention="naive", samples_ms={"step": [[1.0]]})
    write_folder(tmp_path / "r", "steps", [record], missing=["planned-0123456789"])
    cases = {case.case_id: case for case in look(tmp_path / "r").cases}
    missing = cases["planned-0123456789"]
    assert missing.status == "missing"
    assert missing.detail == f"no job has it; run attnbench sweeps=steps results={tmp_path / 'r'}"
    assert cases[record.case_id].status == "ok"


class TestCounted:
    def test_report_says_counted_and_gives_no_method_of_measuring(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "r", "memory", [counted_record()])
        report = render_sweep(folder, "memory", *RecordStore(folder).load()).report
        text = report.read_text(encoding="utf-8")
        assert "1 case: 1 ok. Counted 2026" in text
        assert "- **Counts.** kv_memory: results follow from shapes" in text
        for word in ("Warm-up", "float64", "Statistics", "Measured"):
            assert word not in text

    def test_both_kinds_beside_each_other(self) -> None:
        facts = measurement_facts([counted_record(), make_decode_record("sdpa", us=1.0)])
        text = template("method.md.j2").render(**facts)
        assert "**Counts.** kv_memory:" in text
        assert "**Warm-up.**" in text
        assert "**Counts.**" not in template("method.md.j2").render(
            **measurement_facts([make_decode_record("sdpa", us=1.0)])
        )

    @pytest.mark.parametrize("in_a_row", [False, True])
    def test_every_point_has_a_line(self, in_a_row: bool) -> None:
        record = make_record(samples_ms={"step": [[1.0], [1.0]]})
        record.notes["in_a_row"] = in_a_row
        text = template("method.md.j2").render(**measurement_facts([record]))
        assert ("without a pause" in text) == in_a_row
        assert text.count("- **") == text.count("\n- **") + text.startswith("- **")

    def test_records_from_before_the_gate_and_the_baseline_are_said_to_be(self) -> None:
        """What the method says of checks and of memory is that of every record in the report."""
        early, later = (make_record(device="cuda", seq_len=length) for length in (512, 1024))
        early.check = {"errors": {"o": 1e-3}, "tolerance": 1e-2}
        later.check = early.check | {"limits": {"o": {"error": 1e-3, "tolerance": 1e-2}}}
        for record in (early, later):
            record.memory = [{"source": "cuda", "peak_allocated_bytes": 2**30}]
        later.memory[0]["baseline_allocated_bytes"] = 0

        def method(*records: Record) -> str:
            return template("method.md.j2").render(**measurement_facts(records))

        assert "Before, between and after the measured passes" in method(later)
        assert "Some records here are" not in method(later)
        both = method(early, later)
        assert "they were checked once, on a slice of the problem" in both
        assert "theirs are of all that was allocated" in both


class TestTerminal:
    def test_what_was_counted_is_never_cut(self) -> None:
        """Two stacks in 80 columns: words may wrap, and every one of them is there."""
        from harness.analysis.frame import build_frame

        requests = compose_request(
            ["task=communication_accounting", "task.d_ff=53248,1024", "device=cpu"]
        )
        records = []
        for case in requests.cases:
            record = make_record(task="communication_accounting", mode="")
            record.case, record.case_id = case.to_dict(), case.id
            record.notes["communication_accounting"] = case.task.results()  # type: ignore[attr-defined]
            records.append(record)
        table = build_table("communication_accounting", build_frame(records))
        assert table is not None
        assert table.columns[0].header == "F"
        console = Console(file=io.StringIO(), width=80)
        render_terminal(table, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text
        assert "weights, gradients, AdamW (GB)" in text
        assert "219.9e9" in text
        assert max(map(len, text.splitlines())) <= 80

    def test_headers_are_as_wide_as_their_cells(self) -> None:
        import pandas as pd

        rows = pd.DataFrame({"a": ["16,384 x 53,248"], "b": [1.0]})
        columns = [
            Column(key="a", header="blocks x D x F"),
            Column(key="b", header="peak memory (GiB)", format=fmt.number),
        ]
        console = Console(file=io.StringIO(), width=80)
        render_terminal(Table(caption="It.", columns=columns, rows=rows), console)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert any(line.startswith("blocks x D x F ") for line in lines)
        assert [line.split()[-1] for line in lines[2:5]] == ["peak", "memory", "(GiB)"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--model", "tiny"], "--model: no such flag; write model=tiny"),
            (["--model=tiny"], "--model: no such flag; write model=tiny"),
            (["model=tiny", "--fast"], "--fast: no such flag; write fast=VALUE"),
            (["--fast", "model=tiny"], "--fast: no such flag; write fast=VALUE"),
        ],
    )
    def test_a_key_with_dashes(
        self,
        arguments: list[str],
        said: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["attnbench", *arguments])
        assert cli.main() == 2
        assert capsys.readouterr().err == f"attnbench: {said}\n"

    def test_scale(self) -> None:
        with pytest.raises(ValueError, match=r"^scale=small: must be one of auto, full, tiny"):
            compose_request(["sweeps=quickstart", "scale=small", "device=cpu"])


def test_a_command_ends_with_what_it_found(tmp_path: Path, command: Command) -> None:
    """The quickstart, whose cases are recorded: sentences of its tables and figures, then files."""
    results = shutil.copytree(ROOT / "results" / "cpu-2core", tmp_path / "results")
    done = command("sweeps=quickstart", "scale=tiny", "device=cpu", f"results={results}")
    assert done.returncode == 0, done.stderr
    frame = load(results, sweep="quickstart")
    found = {}
    for name in ("summary", "attention_summary"):
        built = build_table(name, frame)
        assert built is not None
        found[name] = finding_of(built)
    drawn = draw("attention_scaling", frame)
    assert drawn is not None
    found["attention_scaling"] = drawn.finding
    lines = done.stdout.splitlines()
    end = lines.index("18 cases: 18 ok")
    assert lines[end - 4 : end - 1] == [f"{name}: {sentence}" for name, sentence in found.items()]
    assert lines[end + 1].split() == ["report", f"{results}/sweeps/quickstart/report.md"]


class TestWords:
    def test_one_and_many(self) -> None:
        assert fmt.counted(1, "case") == "1 case"
        assert fmt.counted(0, "case") == "0 cases"
        assert fmt.counted(1200, "case") == "1,200 cases"
        assert POINTS["warmup_steps"].describe(1.0) == "1 warm-up step"
        assert POINTS["num_heads"].describe(1) == "1 head"
        assert POINTS["num_heads"].describe(16) == "16 heads"

    def test_counts_and_percents(self) -> None:
        assert [fmt.count(value) for value in (80.0, 1200.0, 2.5)] == ["80", "1,200", "2.50"]
        assert fmt.percent(13.943) == "1,394.3"

    def test_a_long_run_is_announced(self) -> None:
        request = compose_request(["model=tiny", "device=cpu"])
        plan = plan_cases(request, Records())
        assert session._opening(request, plan, 5.2).endswith(": 1 case; predicted time 5 s")
        assert "predicted time 2.0 min. Ctrl-C stops, and the same command goes on; plan=true" in (
            session._opening(request, plan, 120.0)
        )
        recorded = replace(plan, todo=[])
        assert session._opening(request, recorded, 0.0).endswith(
            ": 1 case, recorded already; tables and figures are made again"
        )
