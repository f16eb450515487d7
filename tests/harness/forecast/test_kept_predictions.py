"""Forecasts that are kept before anything is measured (benchmarks.bench_problems)."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import bench_problems
from harness.paths import ROOT


def rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {row["case_id"]: row for row in csv.DictReader(file)}


def test_measured_problems_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(bench_problems.KEPT / "h200.csv")
    measured = set(bench_problems._steps(ROOT / "results" / "h200").index)
    old = {key: {**row, "predicted_ms": "1.0"} for key, row in before.items()}
    with (tmp_path / "h200.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, next(iter(old.values())))
        writer.writeheader()
        writer.writerows(old.values())
    monkeypatch.setattr(bench_problems, "KEPT", tmp_path)
    bench_problems.predict("h200", ROOT / "results" / "h200")
    after = rows(tmp_path / "h200.csv")
    assert list(after) == list(before)
    assert {key for key, row in after.items() if row["predicted_ms"] == "1.0"} == (
        measured & set(before)
    )


def test_a_problem_that_was_measured_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_problems, "KEPT", tmp_path)
    with pytest.raises(ValueError, match="measured, and no prediction of it was kept"):
        bench_problems.predict("h200", ROOT / "results" / "h200")


def test_a_host_predicts_by_its_own_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packaged = rows(bench_problems.KEPT / "h100.csv")
    listed = {key for key, row in packaged.items() if row["list"] == "fourth"}
    steps = bench_problems._steps(ROOT / "results" / "h200")
    others = steps[~steps.index.isin(listed)]
    monkeypatch.setattr(bench_problems, "_steps", lambda results: others)
    monkeypatch.setattr(bench_problems, "KEPT", tmp_path)
    with pytest.raises(ValueError, match="holds no calibration; run attnbench sweeps=calibration"):
        bench_problems.predict("h200", tmp_path, of_host=True)
    with pytest.raises(ValueError, match=r"h200-host\.csv: not there; predict first"):
        bench_problems.show("h200", tmp_path, now=False, of_host=True)
    folder = tmp_path / "sweeps" / "calibration"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    kept = (ROOT / "conf" / "machine" / "h100.json").read_text()
    (folder / "machine.json").write_text(kept)
    bench_problems.predict("h200", tmp_path, of_host=True)
    own = rows(tmp_path / "h200-host.csv")
    assert own.keys() == listed
    assert all(row == packaged[key] for key, row in own.items())
    bench_problems.show("h200", tmp_path, now=False, of_host=True)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 + len(own) + 1
    assert said[-1] == "none is measured yet: attnbench sweeps=forecast_problems"
