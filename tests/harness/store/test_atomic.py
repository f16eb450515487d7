"""Files are whole or absent, whatever interrupts their writing, and heads say how cases ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from records import make_record

from harness.store import atomic
from harness.store.heads import read_heads
from harness.store.record import RecordStore


def test_replace_writes_and_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for data in (b"first", b"second"):
        atomic.replace(path, data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["state.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_create_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    atomic.create(path, b"first")
    with pytest.raises(FileExistsError):
        atomic.create(path, b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["record.json"]


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    atomic.replace(path, b"old")

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic.replace(path, b"new", sync=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_heads(tmp_path: Path) -> None:
    """Of the newest readable attempt; also where the record holds NaN, which JSON lacks."""
    store = RecordStore(tmp_path)
    store.create()
    record = make_record(status="failed", message="ValueError: no\nand more")
    store.write(record)
    wrong = make_record(seed=1, status="wrong", message="o is off")
    wrong.check = {"errors": {"o": float("nan")}, "tolerance": 1.0}
    store.write(wrong)
    cut = store.write(make_record(seed=1))
    cut.write_bytes(cut.read_bytes()[:-20])
    heads, problems = read_heads(store)
    assert {case_id: (head.status, head.message) for case_id, head in heads.items()} == {
        record.case_id: ("failed", "ValueError: no"),
        wrong.case_id: ("wrong", "o is off"),
    }
    (problem,) = problems
    assert str(cut) in problem
