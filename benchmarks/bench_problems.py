"""Predicted beside measured time of the forty problems that no calibration saw.

python -m benchmarks.bench_problems predict h200    # keep predictions, before anything is measured
attnbench sweeps=forecast_problems results=results/h200     # on four GPUs; scale=two_gpus, one_gpu
python -m benchmarks.bench_problems show h200       # the table, from the kept predictions

A machine is one of ``conf/machine``, and its results are those of the folder of its name.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import harness
from harness import forecast
from harness.cases.sweep import load_sweep
from harness.paths import ROOT
from harness.request.grid import expand

KEPT = ROOT / "benchmarks" / "forecast_problems"

TIMES = ("predicted_ms", "low_ms", "high_ms")


def predict(name: str) -> None:
    """Predict every problem on a packaged machine and keep the predictions."""
    machine = forecast.machine(name)
    with (KEPT / f"{name}.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ("case_id", "gpus", "title", *TIMES), lineterminator="\n")
        rows.writeheader()
        # For GPUs, which need not be here.
        for case in expand(load_sweep("forecast_problems").scales["full"], {}, "cuda"):
            found = machine.step(case)
            times = (found.median_ms, found.low_ms, found.high_ms)
            kept = dict(zip(TIMES, (f"{ms:.1f}" for ms in times), strict=True))
            rows.writerow({"case_id": case.id, "gpus": case.world_size, "title": case.title} | kept)


def show(name: str, results: Path) -> None:
    """Print predicted beside measured, and the share within 10%, by number of GPUs and of all."""
    frame = harness.load(results)
    steps = frame[frame["phase"] == "step"]
    known = steps.set_index("case_id")
    errors: dict[str, list[float]] = {}
    covered = 0
    print(f"{'predicted':>9} {'interval':20}{'measured':>10} {'ratio':>6}  problem")
    with (KEPT / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        predicted, low, high = (float(row[key]) for key in TIMES)
        interval = f"[{low:.1f}, {high:.1f}]"
        line = f"{predicted:9.1f} {interval:20}"
        if row["case_id"] in known.index:
            measured = float(known.loc[row["case_id"], "median_ms"])
            marks = ", ".join(known.loc[row["case_id"], "disturbed"] or ())
            errors.setdefault(row["gpus"], []).append(abs(predicted / measured - 1))
            covered += low <= measured <= high
            line += f"{measured:10.1f} {predicted / measured:6.2f}"
            row["title"] += f"  {marks}"
        print(f"{line:48}  {row['title']}".rstrip())
    if not errors:
        print("none is measured yet: attnbench sweeps=forecast_problems")
        return
    errors["all"] = [error for some in errors.values() for error in some]
    for gpus, some in errors.items():
        within = sum(error <= 0.1 for error in some)
        print(f"GPUs {gpus}: {within} of {len(some)} within 10%")
    print(f"{covered} of {len(errors['all'])} in their interval")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_problems")
    parser.add_argument("action", choices=["predict", "show"])
    parser.add_argument("machine", help="one of conf/machine")
    parser.add_argument("--results", type=Path, help="by default results/MACHINE")
    arguments = parser.parse_args()
    try:
        if arguments.action == "predict":
            predict(arguments.machine)
        else:
            show(arguments.machine, arguments.results or ROOT / "results" / arguments.machine)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
