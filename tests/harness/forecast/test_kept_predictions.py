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
