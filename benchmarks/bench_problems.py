"""Predicted beside measured time of problems that no calibration saw.

Forty, a second list that was made when the first had been measured on H100s, a third one that
was made when both had been measured on H200s, a fourth on one GPU, and six steps on eight GPUs.

python -m benchmarks.bench_problems predict h200    # keep predictions, before anything is measured
attnbench sweeps=forecast_problems results=results/h200     # on four GPUs; scale=two_gpus, one_gpu
python -m benchmarks.bench_problems show h200       # the table, from the kept predictions
python -m benchmarks.bench_problems show h200 --now     # by a calibration that may have seen them

A machine is one of ``conf/machine``, and its results are those of the folder of its name. As
``recommend`` predicts, from a calibration of the host that measures the fourth list itself::

    attnbench sweeps=calibration results=FOLDER
    python -m benchmarks.bench_problems predict h200 --host --results FOLDER
    attnbench sweeps=forecast_problems scale=fourth_one_gpu results=FOLDER
    python -m benchmarks.bench_problems show h200 --host --results FOLDER
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

import harness
from harness import forecast
from harness.cases.case import Case
from harness.cases.sweep import load_sweep
from harness.forecast.machines import Machine
from harness.paths import ROOT
from harness.predictions.capacity import machine_named
from harness.request.grid import expand

KEPT = ROOT / "benchmarks" / "forecast_problems"

GIB = 2**30

LISTS = {
    "first": "full",
    "second": "second_two_gpus",
    "third": "third_two_gpus",
    "fourth": "fourth_one_gpu",
    "eight": "eight_gpus",
}
"""Scales of sweeps/forecast_problems.yaml."""

OF_A_HOST = ("fourth",)
"""Lists that a calibration of one host, with one GPU, predicts as well."""

TIMES = ("predicted_ms", "low_ms", "high_ms")


def predict(name: str, results: Path, *, of_host: bool = False) -> None:
    """Predict every problem on a packaged machine and keep the predictions.

    A problem that the results have measured keeps the prediction that was made before.

    Args:
        of_host: by the calibration that the results hold, and kept apart.
    """
    machine = _machine(name, results, of_host=of_host)
    path = _file(name, of_host=of_host)
    measured = set(_steps(results).index) if results.is_dir() else set()
    before = {row["case_id"]: row for row in _kept(path)} if path.is_file() else {}
    rows: list[dict[str, Any]] = []
    scales = load_sweep("forecast_problems").scales
    for kind in OF_A_HOST if of_host else LISTS:
        # For GPUs, which need not be here.
        for case in expand(scales[LISTS[kind]], {}, "cuda").values():
            row = {"list": kind, "case_id": case.id, "gpus": case.world_size, "title": case.title}
            if case.id in measured:
                if case.id not in before:
                    raise ValueError(f"{case.title}: measured, and no prediction of it was kept")
                row |= {key: before[case.id][key] for key in TIMES}
            else:
                found = machine.step(case)
                times = (found.median_ms, found.low_ms, found.high_ms)
                row |= dict(zip(TIMES, (f"{ms:.1f}" for ms in times), strict=True))
            rows.append(row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def show(name: str, results: Path, *, now: bool, of_host: bool = False) -> None:
    """Print predicted beside measured, times and peak memory, and the shares that are close.

    Args:
        now: predicted again, instead of what was kept before anything was measured.
        of_host: what a calibration of the host itself predicted.
    """
    kept = _kept(_file(name, of_host=of_host))
    machine = _machine(name, results, of_host=of_host) if now else None
    known: dict[Any, Any] = _steps(results).to_dict("index")
    usable_gib = machine_named(name).usable_bytes / GIB
    errors: dict[str, list[float]] = {}
    memory: list[float] = []
    covered = unfit = unfit_right = 0
    print(
        f"{'predicted':>9} {'interval':18}{'measured':>10} {'ratio':>6}{'memory':>8}  problem\n"
        f"{'ms':>9} {'ms':18}{'ms':>10} {'time':>6}{'ratio':>8}"
    )
    for row in kept:
        predicted, low, high = (float(row[key]) for key in TIMES)
        if machine is not None and (step := known.get(row["case_id"])):
            found = machine.step(Case.from_dict(step["case"]))
            predicted, low, high = found.median_ms, found.low_ms, found.high_ms
        line = f"{predicted:9.1f} {f'[{low:.1f}, {high:.1f}]':18}"
        if step := known.get(row["case_id"]):
            gib = float(step["predicted_memory_gib"])
            if gib > usable_gib or step["status"] == "oom":
                unfit += 1
                unfit_right += gib > usable_gib and step["status"] == "oom"
            if step["status"] == "oom":
                line += f"{'OOM':>10}{'':15}"
                row["title"] += f"  needs {gib:.1f} GiB of {usable_gib:.1f} by prediction"
            else:
                measured = float(step["median_ms"])
                group = f"{row['list']} list, GPUs {row['gpus']}"
                errors.setdefault(group, []).append(abs(predicted / measured - 1))
                covered += low <= measured <= high
                line += f"{measured:10.1f} {predicted / measured:6.2f}"
                if not math.isnan(gib):
                    memory.append(gib / float(step["peak_memory_gib"]))
                    line += f"{memory[-1]:8.3f}"
                row["title"] += "  " + ", ".join(step["disturbed"] or ())
        print(f"{line:54}  {row['title']}".rstrip())
    if not errors:
        print("none is measured yet: attnbench sweeps=forecast_problems")
        return
    errors["all"] = [error for some in errors.values() for error in some]
    for group, some in errors.items():
        within = sum(error <= 0.1 for error in some)
        print(f"{group}: {within} of {len(some)} within 10%, median {median(some):.1%} off")
    print(f"{covered} of {len(errors['all'])} in their interval")
    if memory:
        off = [abs(ratio - 1) for ratio in memory]
        print(
            f"peak memory: median {median(off):.1%} off, at most {max(off):.1%}, of {len(off)}"
            " problems with a formula"
        )
    if unfit:
        print(f"what does not fit: {unfit_right} of {unfit} right")


def _machine(name: str, results: Path, *, of_host: bool) -> Machine:
    return forecast.machine("here", results) if of_host else forecast.machine(name)


def _file(name: str, *, of_host: bool) -> Path:
    return KEPT / f"{name}{'-host' if of_host else ''}.csv"


def _steps(results: Path) -> pd.DataFrame:
    """The training steps of a results folder, by case."""
    frame = harness.load(results)
    told = frame["status"].isin(["ok", "oom"])
    return frame[(frame["phase"] == "step") & told].set_index("case_id")


def _kept(path: Path) -> list[dict[str, str]]:
    """The predictions that a file keeps."""
    if not path.is_file():
        raise ValueError(f"benchmarks/forecast_problems/{path.name}: not there; predict first")
    with path.open() as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_problems")
    parser.add_argument("action", choices=["predict", "show"])
    parser.add_argument("machine", help="one of conf/machine")
    parser.add_argument("--results", type=Path, help="by default results/MACHINE")
    parser.add_argument("--now", action="store_true", help="show: predict again")
    parser.add_argument("--host", action="store_true", help="by the calibration in the results")
    arguments = parser.parse_args()
    results = arguments.results or ROOT / "results" / arguments.machine
    try:
        if arguments.action == "predict":
            predict(arguments.machine, results, of_host=arguments.host)
        else:
            show(arguments.machine, results, now=arguments.now, of_host=arguments.host)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
