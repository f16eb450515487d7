"""What tables and reports say of the code and the hosts that measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from records import ENVIRONMENT, make_record

from harness.analysis.comparison import AXES, compare
from harness.analysis.frame import build_frame
from harness.cases import format as fmt
from harness.cases.source import source_of
from harness.render.files import to_markdown
from harness.render.latex import to_latex
from harness.render.report import provenance_of
from harness.render.table import ALL_STALE, OTHER_HOST, STALE, build_table
from harness.store.record import Record

SAMPLES = {
    "forward_backward": [[10.0, 10.1, 10.2]],
    "forward": [[3.0, 3.1]],
    "backward": [[7.0, 7.1]],
}


def record(attention: str, *, environment: dict[str, Any] | None = None, **fields: Any) -> Record:
    found = make_record(
        task="attention",
        mode="forward_backward",
        attention=attention,
        samples_ms=SAMPLES,
        environment={**ENVIRONMENT, **(environment or {})},
        **fields,
    )
    found.source = source_of(found.case, found.notes)
    return found


def summary(records: list[Record]) -> str:
    table = build_table("attention_summary", build_frame(records))
    assert table is not None
    assert to_latex(table).isascii()
    return to_markdown(table)


class TestStale:
    def test_rows_of_the_code_of_now_have_no_mark(self) -> None:
        frame = build_frame([record("naive"), record("sdpa")])
        assert not frame["stale"].any()
        assert fmt.DIAMOND not in summary([record("naive"), record("sdpa")])

    def test_a_row_of_other_kernels_is_marked(self) -> None:
        old = record("naive")
        old.source["kernels/backends"] = "0" * 12
        text = summary([old, record("sdpa")])
        assert STALE in text
        marked = [line for line in text.splitlines() if fmt.DIAMOND in line and "|" in line]
        assert len(marked) == 1
        assert "naive" in marked[0]

    def test_where_every_row_is_of_other_kernels_it_is_said_once(self) -> None:
        olds = [record("naive"), record("sdpa")]
        for old in olds:
            old.source["kernels/backends"] = "0" * 12
        text = summary(olds)
        assert ALL_STALE in text
        assert fmt.DIAMOND not in text

    def test_other_measuring_code_is_said_once_and_marks_no_row(self) -> None:
        old = record("naive")
        old.source["harness/bench"] = "0" * 12
        assert fmt.DIAMOND not in summary([old, record("sdpa")])
        (sentence,) = provenance_of([old, record("sdpa")])
        assert sentence == "1 of 2 were measured by other measuring code than now."

    def test_without_a_hash_nothing_is_known(self) -> None:
        old = record("naive")
        old.source = {}
        assert not build_frame([old])["stale"].any()
        (sentence,) = provenance_of([old, record("sdpa")])
        assert sentence.startswith("1 of 2 were recorded before the source that runs was hashed")

    def test_a_stated_revision(self) -> None:
        stated = record("naive", environment={"revision_stated": True})
        (sentence,) = provenance_of([stated])
        assert sentence == "Revisions that were stated for a copy without history: 0123abc."


def test_a_table_names_its_revisions_where_there_are_several() -> None:
    one, other = record("naive"), record("sdpa")
    assert "revisions" not in summary([one, other])
    other = record("sdpa", environment={"git_revision": "fedcba9"})
    other.source = {}
    assert "Measured by 2 revisions: 0123abc (1 case), fedcba9 (1 case)." in summary([one, other])


class TestColumnsOfBackends:
    """Tables with a column for each backend, whose rows hold several cases."""

    @staticmethod
    def text(*records: Record) -> str:
        table = build_table("head_dim_and_gqa", build_frame(list(records)))
        assert table is not None
        return to_markdown(table)

    def test_names_revisions_where_there_are_several(self) -> None:
        assert "Measured" not in self.text(record("naive"), record("sdpa"))
        other = record("sdpa", environment={"git_revision": "fedcba9"})
        other.source = {}
        text = self.text(record("naive"), other)
        assert "Measured by 2 revisions: 0123abc (1 case), fedcba9 (1 case)." in text

    def test_a_cell_of_another_host_than_most_of_its_row_is_marked(self) -> None:
        here, there = ({"host": name} for name in ("alpha", "beta"))
        alike = [record(name, environment=here) for name in ("naive", "sdpa", "flex")]
        assert "hosts" not in self.text(*alike)
        text = self.text(*alike[:2], record("flex", environment=there))
        assert (
            "Measured on 2 hosts, whose times may differ: alpha (2 cases), beta (1 case)." in text
        )
        assert OTHER_HOST in text
        header, _, row = (line.split("|") for line in text.splitlines() if line.startswith("|"))
        marked = [name.strip() for name, cell in zip(header, row, strict=True) if "△" in cell]
        assert marked == ["flex (TFLOP/s)"]

    def test_hosts_that_are_not_recorded(self) -> None:
        text = self.text(record("naive", environment={"host": "alpha"}), record("sdpa"))
        assert (
            "Measured on hosts whose times may differ: alpha (1 case), not recorded (1 case)."
        ) in text
        assert "hosts" not in self.text(record("naive"), record("sdpa"))


def test_revisions_of_the_code_of_now_are_only_counted() -> None:
    one, other = record("naive"), record("sdpa", environment={"git_revision": "fedcba9+"})
    assert "Measured by 2 revisions whose measured code is that of now." in summary([one, other])
    other.source["kernels/backends"] = "0" * 12
    assert "Measured by 2 revisions: 0123abc (1 case), fedcba9+ (1 case)." in summary([one, other])


def test_a_tree_with_changes_may_be_the_code_of_now() -> None:
    """A copy names the last commit that it has; its hashes say what it ran."""
    copied, changed = (
        record(name, environment={"git_revision": "0123abc+"}) for name in ("naive", "sdpa")
    )
    changed.source["kernels/backends"] = "0" * 12
    (sentence,) = provenance_of([copied, changed, record("flex")])
    assert sentence == (
        "2 of 3 were measured in a tree with changes to the commit that is named (+), such as a "
        "copy without the later history; by the hashes of its source, what 1 of them measured is "
        "the code of now."
    )
    changed.source = {}
    assert any("what 1 of them measured" in words for words in provenance_of([copied, changed]))


def test_a_copy_without_the_history_has_the_same_hashes(tmp_path: Path) -> None:
    """A commit that is older than its files, as where a tree is copied beside an old clone."""
    for name in ("kernels", "models", "parallel", "harness", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    made = record("naive")
    code = (
        "import json, sys; from harness.cases.source import source_of; import harness;"
        "case, notes = json.load(sys.stdin);"
        "print(json.dumps([harness.__file__, source_of(case, notes)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([made.case, made.notes]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    file, source = json.loads(done.stdout)
    assert file.startswith(str(tmp_path))
    assert source == made.source


@pytest.mark.parametrize(
    ("hosts", "mark"),
    [(("a", "b"), fmt.TRIANGLE), (("a", "a"), ""), ((None, "a"), "")],
)
def test_a_comparison_of_two_hosts_says_so(hosts: tuple[Any, Any], mark: str) -> None:
    records = [
        record(name, environment={"host": host})
        for name, host in zip(("naive", "sdpa"), hosts, strict=True)
    ]
    frame = build_frame(records)
    rows = compare(frame, AXES["attention"])
    assert not rows.empty
    assert set(rows["apart_mark"]) == {mark}
    table = build_table("comparison", frame)
    assert table is not None
    assert (OTHER_HOST in table.footnotes) == bool(mark)


def test_two_devices_are_not_compared() -> None:
    records = [
        record(name, environment={"device_name": device})
        for name, device in (("naive", "NVIDIA H200"), ("sdpa", "NVIDIA A100-SXM4-80GB"))
    ]
    assert compare(build_frame(records), AXES["attention"]).empty
