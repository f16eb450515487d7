"""Edits that change nothing of what is timed: the table's rows, and what they are worth."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from harness.source import hashes, unchanged
from harness.source.unchanged import ABSENT, Row, code_of

FILE = "kernels/sinks.py"


def _code(name: str) -> str:
    return code_of((ROOT / name).read_text(), Path(name).suffix)


def test_the_rows_of_a_file_lead_from_its_code_of_now_to_earlier_ones() -> None:
    rows = unchanged.read(unchanged.TABLE)
    codes: dict[str, list[str]] = {}
    for row in rows:
        assert (ROOT / row.file).is_file(), row.file
        edits = codes.setdefault(row.file, [_code(row.file)])
        assert row.code == edits[-1], (
            f"{row.file}: edited since its row was written; delete its rows if a time may have "
            "changed, else write one for the edit (harness/source/unchanged.py)"
        )
        assert row.counts_as not in ("", *edits), row.file
        edits.append(row.counts_as)
        assert len(row.reason.split()) > 5, row.file


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "unchanged.csv"
    monkeypatch.setattr(unchanged, "TABLE", path)
    _forget()
    yield path
    _forget()


def _forget() -> None:
    unchanged._rows.cache_clear()
    hashes._hashes.cache_clear()
    hashes._code.cache_clear()


def _write(table: Path, *rows: Row) -> None:
    lines = [",".join((row.file, row.code, row.counts_as, row.unless, row.reason)) for row in rows]
    table.write_text("\n".join(["file,code,counts_as,unless,reason", *lines]) + "\n")
    _forget()


def _hash(*names: str, options: Iterable[str] = ()) -> dict[str, str]:
    for name in names:
        hashes._name(ROOT / name)
    return hashes.hashes(frozenset(names), frozenset(options))


def _row(**changes: str) -> Row:
    row = Row(file=FILE, code=_code(FILE), counts_as="0" * 64, unless="", reason="r")
    return replace(row, **changes)


def test_a_file_counts_by_the_code_of_its_row(table: Path) -> None:
    own = _hash(FILE)
    _write(table, _row())
    before = _hash(FILE)
    assert before != own
    _write(table, _row(code="1" * 64))
    assert _hash(FILE) == own, "a row of other code counts for nothing"


def test_an_earlier_edit_counts_where_a_later_one_changes_nothing(table: Path) -> None:
    between, first = _row(counts_as="1" * 64), _row(code="1" * 64, unless="task.value_dim")
    _write(table, replace(first, code=between.code))
    at_first = _hash(FILE)
    _write(table, between, first)
    assert _hash(FILE) == at_first
    _write(table, between)
    at_second = _hash(FILE)
    _write(table, between, first)
    assert at_second != at_first
    assert _hash(FILE, options=["task.value_dim"]) == at_second


def test_a_case_that_runs_what_is_new_counts_by_the_code_of_now(table: Path) -> None:
    own = _hash(FILE)
    _write(table, _row(unless="task.value_dim attention.sinks"))
    assert _hash(FILE) != own
    assert _hash(FILE, options=["task.value_dim"]) == own
    case = {"task": {"name": "attention", "value_dim": 128}, "attention": {"name": "naive"}}
    assert unchanged.options_of(case) == {"task.value_dim"}
    assert not unchanged.options_of({"task": {"name": "train_step"}, "attention": None})
    assert not unchanged.options_of({"task": {"value_dim": None}})


def test_an_option_with_a_bound_is_of_cases_above_it(table: Path) -> None:
    _write(table, _row(unless="task.head_dim>128 model.head_dim>128"))
    for head_dim in (None, 64, 128):
        assert not unchanged.options_of({"task": {"head_dim": head_dim}, "model": None})
    assert unchanged.options_of({"task": {"head_dim": 136}}) == {"task.head_dim>128"}
    model = {"d_model": 4096, "num_heads": 32}
    assert not unchanged.options_of({"task": {"name": "train_step"}, "model": model})
    wide = {"model": {**model, "num_heads": 16}}
    assert unchanged.options_of(wide) == {"model.head_dim>128"}


def test_a_new_file_counts_as_absent(table: Path) -> None:
    alone = _hash("kernels/merge.py")
    assert _hash("kernels/merge.py", FILE) != alone
    _write(table, _row(counts_as=ABSENT))
    assert _hash("kernels/merge.py", FILE) == alone


def _commit(folder: Path) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["add", "."], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit of ``a.py``."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "a.py").write_text("A = 1\n")
    subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    _commit(folder)
    monkeypatch.setattr(unchanged, "ROOT", folder)
    return folder


def test_rows_go_back_to_the_first_code(checkout: Path, table: Path) -> None:
    first = code_of("A = 1\n", ".py")
    (checkout / "a.py").write_text("A = 1\nB = 2\n")
    (checkout / "new.py").write_text("C = 3\n")
    unchanged.main(["HEAD", "B is read by nobody", "a.py", "new.py", "--unless", "task.b"])
    a, new = unchanged.read(table)
    assert (a.file, a.counts_as, a.reason) == ("a.py", first, "B is read by nobody")
    assert a.unless == new.unless == "task.b"
    assert (new.file, new.counts_as) == ("new.py", ABSENT)

    _commit(checkout)
    (checkout / "a.py").write_text("A = 1\nB = 3\n")
    unchanged.main(["HEAD", "nor is this one", "a.py", "--unless", "task.c"])
    last, a, new = unchanged.read(table)
    assert (last.counts_as, last.unless, last.reason) == (a.code, "task.c", "nor is this one")
    assert last.code == code_of("A = 1\nB = 3\n", ".py")
    assert (a.counts_as, a.unless, new.file) == (first, "task.b", "new.py")

    unchanged.main(["HEAD", "in other words", "a.py", "--unless", "task.c"])
    assert unchanged.read(table) == [replace(last, reason="in other words"), a, new]
    unchanged.main(["HEAD~1", "against an earlier commit", "a.py"])
    assert [row.counts_as for row in unchanged.read(table)] == [first, ABSENT]
    _write(table, last, a, new)

    _commit(checkout)
    (checkout / "a.py").write_text("A = 1\nB = 2\n")
    unchanged.main(["HEAD", "as it was in between", "a.py"])
    assert unchanged.read(table) == [a, new]

    _commit(checkout)
    (checkout / "a.py").write_text("A = 1\n")
    unchanged.main(["HEAD", "as it was", "a.py"])
    assert [row.file for row in unchanged.read(table)] == ["new.py"], "it counts by its own code"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["HEAD", "r", "b.py"], "b.py: no such file"),
        (["HEAD", "r", "a.py"], "a.py: runs as it did at HEAD"),
        (["none", "r", "a.py"], "none: no such commit"),
    ],
)
def test_what_makes_no_row(
    checkout: Path,
    table: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    with pytest.raises(SystemExit):
        unchanged.main(arguments)
    assert said in capsys.readouterr().err
    assert not table.exists()
