"""Predicted beside measured time of the forty problems that no calibration saw.

python benchmarks/bench_problems.py write        # keep predictions, before anything is measured
attnbench sweeps=forecast_problems               # on four GPUs; scale=one_gpu, scale=two_gpus
python benchmarks/bench_problems.py [results]    # the table, from the kept predictions
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import harness
from harness import forecast
from harness.cases.sweep import load_sweep
from harness.paths import ROOT
from harness.request.grid import expand

KEPT = ROOT / "benchmarks" / "forecast_problems.csv"

FIELDS = ("case_id", "gpus", "title", "predicted_ms", "low_ms", "high_ms")


def write() -> None:
    """Predict every problem on the packaged H200 and keep the predictions."""
    machine = forecast.machine("h200")
    with KEPT.open("w", newline="") as file:
        rows = csv.DictWriter(file, FIELDS, lineterminator="\n")
        rows.writeheader()
        # For GPUs, which need not be here.
        for case in expand(load_sweep("forecast_problems").scales["full"], {}, "cuda"):
            found = machine.step(case)
            times = (found.median_ms, found.low_ms, found.high_ms)
            values = (case.id, case.world_size, case.title, *(f"{ms:.1f}" for ms in times))
            rows.writerow(dict(zip(FIELDS, values, strict=True)))


def show(results: Path) -> None:
    """Print predicted beside measured, and the share within 10%."""
    frame = harness.load(results)
    steps = frame[(frame["phase"] == "step") & (frame["status"] == "ok")]
    known = dict(zip(steps["case_id"], steps["median_ms"], strict=True))
    errors, covered = [], 0
    for row in csv.DictReader(KEPT.open()):
        predicted, low, high = (float(row[key]) for key in FIELDS[3:])
        line = f"{predicted:9.1f} [{low:.1f}, {high:.1f}]"
        if row["case_id"] in known:
            measured = known[row["case_id"]]
            errors.append(abs(predicted / measured - 1))
            covered += low <= measured <= high
            line += f" {measured:9.1f} {predicted / measured:6.2f}"
        print(f"{line:44}  {row['title']}")
    if errors:
        within = sum(error <= 0.1 for error in errors)
        print(f"{within} of {len(errors)} within 10%, {covered} in their interval")
    else:
        print("none is measured yet: attnbench sweeps=forecast_problems")


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write()
    else:
        show(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "h200")
