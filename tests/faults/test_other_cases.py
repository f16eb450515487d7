"""Records whose ``case`` is not the one that their name and ``case_id`` say: each reader's view."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
from mutations import examples
from records import make_record, write_plan

from harness.analysis.loading import load_frame
from harness.cases.case import Case, digest_of
from harness.cases.recorded import load
from harness.commands import compare, report, status
from harness.store.record import Record, RecordStore
from harness.writeup.collecting import collect

SAMPLES = {"step": [[1.0, 1.1, 0.9]]}


@pytest.fixture
def changed(tmp_path: Path) -> tuple[Path, str]:
    """Two records, of which one holds another length than its id; and its id."""
    store = RecordStore(tmp_path / "results")
    store.create()
    records = [make_record(attention=name, samples_ms=SAMPLES) for name in ("naive", "sdpa")]
    for record in records:
        store.write(record)
    write_plan(store.results, "all", records, tables=["summary"])
    path = store.path(records[0].case_id, 1)
    values = json.loads(path.read_bytes())
    values["case"]["seq_len"] *= 2
    path.write_text(json.dumps(values))
    return store.results, records[0].case_id


def test_load(changed: tuple[Path, str]) -> None:
    results, case_id = changed
    with pytest.warns(UserWarning, match=f"{case_id}.json: .*its case is that of train_step-"):
        frame = load_frame(results)
    assert list(frame["attention"].unique()) == ["sdpa"]


def test_status(changed: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    results, case_id = changed
    assert status.main([str(results)]) == 0
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if "its case is that of" in line]
    assert f"{case_id}.json" in line
    assert f"missing  {case_id}" in printed.out
    assert f"ok       {case_id}" not in printed.out


def test_report(changed: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    results, case_id = changed
    report.main([str(results)])
    lines = [line for line in capsys.readouterr().err.splitlines() if "its case is that" in line]
    assert len(lines) == 1
    assert f"{case_id}.json" in lines[0]
    assert "naive" not in (results / "sweeps/all/tables/summary.csv").read_text()


def test_writeup(changed: tuple[Path, str]) -> None:
    results, case_id = changed
    problems = [line for line in collect([results]).problems if "its case is that" in line]
    assert len(problems) == 1
    assert case_id in problems[0]


def test_compare(
    changed: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, case_id = changed
    other = shutil.copytree(results, tmp_path / "other")
    assert compare.main([str(results), str(other)]) == 0
    out, err = capsys.readouterr()
    assert err.count("its case is that of") == 2
    assert "other against results: 1 case: " in out
    assert case_id in err


def test_real_records_have_the_digest_of_their_cases() -> None:
    """With and without the options that joined later, and without building the case."""
    for values in examples():
        record = Record.from_json(json.dumps(values))
        assert record.case_id.endswith(f"-{digest_of(record.case)}")
        whole = Case.from_dict(record.case).to_dict()
        assert record.case_id.endswith(f"-{digest_of(whole)}")
        assert not record.case_id.endswith(f"-{digest_of(whole | {'seed': 77})}")


def test_a_choice_of_another_version_stands_under_its_name(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.create()
    record = make_record(samples_ms=SAMPLES)
    record.case["attention"] = {"name": "of_tomorrow", "speed": 2}
    store.write(record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(load(store)[0]) == [record.case_id]
