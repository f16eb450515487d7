"""Folders of results in which something else lies where a folder or a lock should."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from records import make_record, write_plan

from harness.commands import pack, report, status, writeup
from harness.render import files
from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.store.record import RecordStore

SAMPLES = {"step": [[1.0, 1.1, 0.9]]}


def a_file(path: Path) -> None:
    path.write_text("hello")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "gone" / "there")


PLACES = [a_file, os.mkfifo, a_link_to_nothing]
Place = Callable[[Path], None]


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    made = RecordStore(tmp_path / "results")
    made.create()
    records = [make_record(attention=name, samples_ms=SAMPLES) for name in ("naive", "sdpa")]
    for record in records:
        made.write(record)
    write_plan(made.results, "all", records, tables=["summary"])
    return made


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["records", "records/archive"])
def test_what_is_no_folder_of_records_is_named(
    name: str, place: Place, store: RecordStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.results / name
    shutil.rmtree(path, ignore_errors=True)
    place(path)
    line = f"{path}: not a readable folder ("
    report.main([str(store.results)])
    assert line in capsys.readouterr().err
    assert status.main([str(store.results)]) == 0
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_lock_that_is_no_file_is_not_opened(place: Place, store: RecordStore) -> None:
    path = store.folder / ".lock"
    place(path)
    with pytest.raises(OSError, match=r"\.lock"), store.claim("case-0123456789", wait=False):
        pass
    assert not (store.folder / "gone").exists()
    assert pack.main([str(store.results)]) == 2


@pytest.mark.parametrize("below", ["", "all", "all/tables", "all/figures"])
def test_a_report_is_not_written_through_a_link(
    below: str, store: RecordStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path, elsewhere = store.results / "sweeps" / below, store.results.parent / "elsewhere"
    path.mkdir(exist_ok=True)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    assert report.main([str(store.results)]) == 2
    assert "cannot be written (a link leads out of the results folder)" in capsys.readouterr().err
    assert sorted(elsewhere.rglob("*")) == before


@pytest.mark.parametrize("name", ["writeup", "records/archive"])
def test_a_document_and_archives_are_not_written_through_a_link(
    name: str, store: RecordStore, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = store.results.parent / "elsewhere"
    elsewhere.mkdir()
    (store.results / name).symlink_to(elsewhere)
    command = writeup.main if name == "writeup" else pack.main
    assert command([str(store.results)]) == 2
    assert "a link leads out of the results folder" in capsys.readouterr().err
    assert not [*elsewhere.iterdir()]


def test_a_report_that_cannot_be_written_costs_its_sweep(
    store: RecordStore, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = (store.results / "sweeps/all/plan.json").read_text()
    (store.results / "sweeps/others").mkdir()
    changed = plan.replace('"label": "all"', '"label": "others"')
    (store.results / "sweeps/others/plan.json").write_text(changed)
    place = store.results / "sweeps/all/tables"
    a_file(place)
    assert report.main([str(store.results)]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert line.startswith(f"attnbench-report: {place}")
    assert "others: 1 tables" in printed.out


def test_a_sweep_whose_records_break_every_table_is_named(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the report, and by a run that has measured."""

    def breaks(*arguments: object, **keywords: object) -> None:
        raise ValueError("math domain error")

    monkeypatch.setattr(files, "build_frame", breaks)
    assert report.main([str(store.results)]) == 2
    line = f"attnbench-report: {store.results / 'sweeps/all'}: math domain error"
    assert capsys.readouterr().err.splitlines() == [line]
    arguments = ["task=flop_balance", "seq_len=1024", "device=cpu", f"results={store.results}"]
    request = compose_request(arguments)
    store.write(
        replace(make_record(), case=request.cases[0].to_dict(), case_id=request.cases[0].id)
    )
    assert run_request(request) == 2
    assert capsys.readouterr().err.strip().endswith(": math domain error")


def test_a_plan_that_names_a_case_twice(
    store: RecordStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.results / "sweeps/all/plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps(plan | {"case_ids": plan["case_ids"] * 3}))
    assert report.main([str(store.results)]) == 0
    rows = (path.parent / "tables/summary.csv").read_text().splitlines()
    assert len(rows) == 1 + len(plan["case_ids"])
    assert capsys.readouterr().err == ""
