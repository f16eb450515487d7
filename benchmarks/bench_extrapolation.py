"""How far laws are off at shapes far from those that they were fitted to, by distance.

Each law of a calibration is fitted to the smallest third of its shapes and predicts the others.

python -m benchmarks.bench_extrapolation [machine]
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from statistics import median

import numpy as np

from harness import forecast
from harness.forecast.law import Estimate, Law, Observation
from harness.forecast.masks import options_of

LEAST_SHAPES = 8

EDGES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Doublings between which errors are put together."""


def extrapolated(name: str) -> list[tuple[Estimate, float]]:
    """Estimates of shapes that a law was not fitted to, and their log errors."""
    machine = forecast.machine(name)
    found = []
    for law, items in machine.calibration.observations.items():
        # How far windows are from causal calls is another question (bench_windows.py).
        plain = [item for item in items if not law.startswith("attention/") or not _masked(item)]
        alone = [item for item in plain if len(item.shapes) == 1]
        if len(alone) < LEAST_SHAPES:
            continue
        alone.sort(key=lambda item: math.prod(item.shapes[0]))
        kept = alone[: len(alone) // 3]
        fitted = Law(machine.features(law), kept, machine.typical(law))
        for item in alone[len(kept) :]:
            one = fitted(item.shapes[0])
            found.append((one, math.log(one.ms / item.ms)))
    return found


def _masked(item: Observation) -> bool:
    return bool(options_of(item.shapes[0]))


def main(name: str) -> None:
    found = extrapolated(name)
    print(f"{'doublings':>12}{'shapes':>8}{'median':>9}{'rms':>7}{'claimed':>9}{'in 90% int.':>13}")
    for low, high in pairwise(EDGES):
        items = [(one.error, error) for one, error in found if low <= one.distance < high]
        if items:
            claimed, errors = map(np.array, zip(*items, strict=True))
            print(
                f"{low:>6} to {high:2}{len(items):8}{median(abs(errors)):9.2f}"
                f"{np.sqrt(np.mean(errors**2)):7.2f}{np.sqrt(np.mean(claimed**2)):9.2f}"
                f"{np.mean(abs(errors) < 1.645 * claimed):13.0%}"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "h200")
