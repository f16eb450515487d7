"""How far attention calls with windows are off, predicted from other calls.

Each backend's law of a pass is fitted twice: to its causal calls alone, and to these and all calls
with windows but those of the predicted window. The truth is what the device took in committed
records of attention under windows.

python benchmarks/bench_windows.py [results/h200]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

import harness
from harness.forecast import build
from harness.forecast.calibration import Calibration
from harness.forecast.law import Estimate, Law, Observation, Shape
from harness.forecast.machines import Machine
from harness.forecast.masks import options_of
from harness.paths import ROOT

Keep = Callable[[Shape, Shape], bool]
"""Whether a measured shape may calibrate the prediction of another one."""

KEPT: dict[str, Keep] = {
    "causal calls alone": lambda shape, held: not options_of(shape),
    "and other windows": lambda shape, held: window_of(shape) != window_of(held),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Scored:
    """One pass of one call with a window."""

    law: str
    shape: Shape
    ms: float
    found: Estimate

    @property
    def error(self) -> float:
        return float(np.log(self.found.ms / self.ms))


def window_of(shape: Shape) -> int | None:
    """The window of an attention shape, in keys."""
    return round(shape[3] * shape[5]) if "window" in options_of(shape) else None


def scored(calibration: Calibration, keep: Keep) -> Iterator[Scored]:
    machine = Machine(calibration)
    for name, items in sorted(calibration.observations.items()):
        windowed = [item for item in items if name.startswith("attention/") and _is_windowed(item)]
        laws: dict[int | None, Law] = {}
        for item in windowed:
            (shape,) = item.shapes
            window = window_of(shape)
            if window not in laws:
                kept = [other for other in items if keep(other.shapes[0], shape)]
                laws[window] = Law(machine.features(name), kept)
            yield Scored(law=name, shape=shape, ms=item.ms, found=laws[window](shape))


def _is_windowed(item: Observation) -> bool:
    return options_of(item.shapes[0]) == {"window"}


def main(results: Path) -> None:
    calibration = build.kernels("h200", harness.load(results))
    found = {name: list(scored(calibration, keep)) for name, keep in KEPT.items()}
    print("predicted / measured           measured (ms)" + "".join(f"{name:>22}" for name in KEPT))
    for rows in zip(*found.values(), strict=True):
        _, backend, dtype, phase = rows[0].law.split("/")
        ratios = "".join(f"{np.exp(row.error):22.2f}" for row in rows)
        where = f"{backend} {phase}, {window_of(rows[0].shape):,} of {rows[0].shape[3]:,.0f}"
        print(f"{where:46}{rows[0].ms:9.3f}{ratios}")
    for name, items in found.items():
        errors = np.array([item.error for item in items])
        claimed = np.array([item.found.error for item in items])
        print(
            f"{name}: {len(items)} passes, {np.mean(abs(np.expm1(errors)) < 0.1):.0%} within 10%, "
            f"median {median(abs(np.expm1(errors))):.0%}, root mean square (log) "
            f"{np.sqrt(np.mean(errors**2)):.2f}, claimed {np.sqrt(np.mean(claimed**2)):.2f}, "
            f"{np.mean(abs(errors) < 1.645 * claimed):.0%} in the 90% interval"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "h200")
