"""Predicted beside measured time of every committed case: how long a plan says that it takes.

Run as ``python -m benchmarks.bench_plan [RESULTS ...]`` in the repository; by default the results
of the H100s and the H200s. A row for each task and number of ranks, compiled and not: cases,
minutes predicted and measured, and quartiles of measured over predicted.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import quantiles

import harness
from harness.cases.case import Case
from harness.paths import ROOT
from harness.request.plan import predicted_seconds

FOLDERS = (ROOT / "results" / "h100", ROOT / "results" / "h200")

Kind = tuple[str, int, bool]


def seconds_of(folder: Path) -> dict[Kind, list[tuple[float, float]]]:
    """Seconds that were predicted and measured, by task, ranks, and whether anything is compiled.

    Cases of plugins and of options that are no more are left out.
    """
    found: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
    frame = harness.load(folder).drop_duplicates("case_id")
    told = frame[(frame["status"] == "ok") & frame["wall_s"].notna()]
    for row in told.to_dict("records"):
        try:
            case = Case.from_dict(row["case"])
        except ValueError:
            continue
        rounds = len(row["rounds_started_at"] or ()) or 1
        predicted = predicted_seconds(case, str(row["device_name"]), rounds)
        kind = str(row["task"]), case.world_size, case.compiles
        found[kind].append((predicted, float(row["wall_s"])))
    return found


def main(folders: list[Path]) -> None:
    found: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for folder in folders:
        for kind, seconds in seconds_of(folder).items():
            found[kind] += seconds
    everything = [pair for pairs in found.values() for pair in pairs]
    steps = [pair for kind, pairs in found.items() if kind[0] == "train_step" for pair in pairs]
    print(f"{'':34}{'cases':>6}{'predicted':>11}{'measured':>10}  quartiles of the ratio")
    for (task, ranks, compiled), pairs in sorted(found.items()):
        name = f"{task}, {ranks} rank{'s' if ranks > 1 else ''}{', compiled' if compiled else ''}"
        print(_line(name, pairs))
    print(_line("training steps", steps))
    print(_line("all", everything))


def _line(name: str, pairs: list[tuple[float, float]]) -> str:
    predicted, measured = (sum(values) / 60 for values in zip(*pairs, strict=True))
    line = f"{name:34}{len(pairs):6}{predicted:7.1f} min{measured:6.1f} min"
    if len(pairs) < 4:
        return line
    ratios = quantiles([real / expected for expected, real in pairs], n=4)
    return line + "".join(f"{ratio:7.2f}" for ratio in ratios)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or list(FOLDERS))
