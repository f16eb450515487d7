"""The report of a sweep: its files, the same bytes each time, and the command that writes it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from records import (
    audit_examples,
    decode_examples,
    make_record,
    profile_examples,
    split_examples,
    write_plan,
)
from status_examples import status_examples

from harness.cases.case import digest_of
from harness.commands import report
from harness.render.files import RenderedSweep, render_sweep
from harness.render.report import failures_of
from harness.render.table import TABLES
from harness.store.attempts import Records
from harness.store.record import Record, RecordStore

FIGURES = ["attention_scaling", "step_time"]
"""Lines and bars; test_figures draws them all."""


@pytest.fixture
def records() -> list[Record]:
    return status_examples()


def write_results(folder: Path, records: list[Record], **plan: list[str]) -> RecordStore:
    store = RecordStore(folder)
    store.create()
    for record in records:
        store.write(record)
    write_plan(folder, "all", records, **{"tables": TABLES.names(), **plan})
    return store


def examples() -> list[Record]:
    """Records of every table, two of them with a bootstrap interval to draw."""
    others = (split_examples, audit_examples, profile_examples, decode_examples)
    timed = [
        make_record(
            attention=attention,
            seq_len=64,
            samples_ms={"step": [[base + index**1.5 for index in range(21)]]},
        )
        for attention, base in (("naive", 20.0), ("flex", 9.0))
    ]
    found = [*status_examples(), *itertools.chain(*(make() for make in others)), *timed]
    for record in found:
        digest = digest_of(record.case)
        # Those that were changed after they were made; another's id would be set aside.
        if not record.case_id.endswith(f"-{digest}"):
            record.case_id += f"-{digest}"
    return found


def write_examples(folder: Path, records: list[Record]) -> RecordStore:
    store = write_results(folder, records)
    write_plan(
        folder, "all", examples(), tables=TABLES.names(), figures=FIGURES,
        missing=["planned-0123456789"],
    )  # fmt: skip
    (store.folder / "broken-aaaaaaaaaa.json").write_text("{", encoding="utf-8")
    return store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def rendered(folder: Path) -> RenderedSweep:
    store = write_examples(folder, examples())
    found, problems = store.load()
    return render_sweep(folder, "all", found, problems)


class TestSweep:
    def test_every_file_and_a_complete_report(self, folder: Path, rendered: RenderedSweep) -> None:
        tables = [table.name for table in rendered.tables]
        assert tables == [name for name in TABLES.names() if name in tables]
        # Those that the examples fill; who adds a table need not add an example here.
        assert len(tables) >= 46
        names = {path.relative_to(rendered.folder).as_posix() for path in rendered.paths}
        expected = {f"tables/{name}.{end}" for name in tables for end in ("csv", "md", "tex")}
        expected |= {f"figures/{name}.{end}" for name in FIGURES for end in ("png", "svg")}
        assert names == expected | {"report.md"}
        assert not list(folder.rglob("*.tmp"))
        text = rendered.report.read_text(encoding="utf-8")
        for words in (
            "# A sweep of examples",
            "attnbench sweeps=all",
            "- planned-0123456789",
            "records/broken-aaaaaaaaaa.json",
            "CUDA out of memory",
            "a_b & 50% \\| $",
            "](figures/step_time.png)",
            "| device | NVIDIA H200 |",
            "1 wrong result",
            "1 not measured",
        ):
            assert words in text
        assert str(folder) not in text

    def test_rendering_again_gives_the_same_bytes(
        self, rendered: RenderedSweep, tmp_path: Path
    ) -> None:
        """In another folder, in another process, from records listed in another order."""
        write_examples(tmp_path, examples()[::-1])
        subprocess.run(
            [sys.executable, "-m", "harness.commands.report", str(tmp_path)],
            check=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": "1"},
            capture_output=True,
        )
        first, second = (
            {path.relative_to(sweep): path.read_bytes() for path in sorted(sweep.rglob("*.*"))}
            for sweep in (rendered.folder, tmp_path / "sweeps" / "all")
        )
        assert first.keys() == second.keys()
        assert len(first) > 30
        assert [path for path in first if first[path] != second[path]] == []

    def test_a_table_that_has_become_empty_is_removed(
        self, records: list[Record], tmp_path: Path
    ) -> None:
        store = write_results(tmp_path, records, tables=["summary"])
        found, _ = store.load()
        path = tmp_path / "sweeps" / "all" / "tables" / "summary.md"
        render_sweep(tmp_path, "all", found, [])
        assert path.exists()
        render_sweep(tmp_path, "all", Records(), [])
        assert not path.exists()


def test_unsupported_cases_of_one_reason_take_one_line() -> None:
    """Others that have no number stay apart, whatever their reason: each has a log of its own."""
    lacking = [
        make_record(attention=attention, seq_len=seq_len, status="unsupported", message=message)
        for attention, message in (
            ("flash_attn_3", "no A"),
            ("flash_attn_2", "no A"),
            ("flex", "B"),
        )
        for seq_len in (64, 128)[: 1 + (message == "no A")]
    ]
    failed = [make_record(seq_len=n, status="failed", message="no A") for n in (64, 128)]
    assert failures_of([*lacking[:2], failed[0], *lacking[2:], failed[1], make_record()]) == [
        ("4 cases: flash_attn_2, flash_attn_3", "unsupported", "no A"),
        (failed[0].case_id, "failed", "no A"),
        (lacking[4].case_id, "unsupported", "B"),
        (failed[1].case_id, "failed", "no A"),
    ]


def test_unsupported_cases_that_call_no_attention_name_no_backend() -> None:
    lacking = [make_record(seq_len=n, status="unsupported", message="no A") for n in (64, 128)]
    for record in lacking:
        record.case["task"] = {"name": "collectives"}
    assert failures_of(lacking) == [("2 cases", "unsupported", "no A")]


class TestReportCommand:
    def test_renders_around_an_unreadable_record(
        self, records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = write_results(tmp_path, records, tables=["cases"])
        path = store.path(records[0].case_id, 1)
        path.write_text(path.read_text(encoding="utf-8")[:100], encoding="utf-8")
        assert report.main([str(tmp_path)]) == 0
        output = capsys.readouterr()
        assert str(path) in output.err
        assert "report.md" in output.out
        table = (tmp_path / "sweeps" / "all" / "tables" / "cases.md").read_text(encoding="utf-8")
        assert "sdpa_flash" in table
        text = (tmp_path / "sweeps" / "all" / "report.md").read_text(encoding="utf-8")
        assert f"- {records[0].case_id}" in text

    def test_no_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert report.main([str(tmp_path / "nothing")]) == 2
        error = capsys.readouterr().err
        assert error == f"attnbench-report: RESULTS={tmp_path / 'nothing'}: no such folder\n"

    def test_not_a_results_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert report.main([str(tmp_path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_unknown_sweep(
        self, records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_results(tmp_path, records)
        assert report.main([str(tmp_path), "nope"]) == 2
        assert "SWEEP=nope" in capsys.readouterr().err

    def test_broken_plan_spares_the_other_sweeps(
        self, records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_results(tmp_path, records, tables=["summary"])
        broken = tmp_path / "sweeps" / "aaa" / "plan.json"
        broken.parent.mkdir()
        broken.write_text("{}", encoding="utf-8")
        assert report.main([str(tmp_path)]) == 2
        assert str(broken) in capsys.readouterr().err
        assert (tmp_path / "sweeps" / "all" / "report.md").exists()


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys; from harness.commands import lazy_imports; lazy_imports.install(); "
        "from harness.commands import report; from harness.render.table import TABLES; "
        "from harness.render.figure import FIGURES; TABLES.names(); FIGURES.names(); "
        "sys.exit('torch._C' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
