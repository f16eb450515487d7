"""How far attention calls with windows are off, predicted from other calls.

Each backend's law of a pass is fitted twice: to its causal calls alone, and to these and all calls
with windows but those of the predicted window. The truth is what the device took in committed
records of attention under windows.

python -m benchmarks.bench_windows [results/h200]
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
from harness.forecast.schedule import Z90
from harness.paths import ROOT

Keep = Callable[[Shape, Shape], bool]
"""Whether a measured shape may calibrate the prediction of another one."""

CAUSAL = "causal calls alone"

KEPT: dict[str, Keep] = {
    CAUSAL: lambda shape, held: not options_of(shape),
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
        _, backend, _, phase = rows[0].law.split("/")
        ratios = "".join(f"{np.exp(row.error):22.2f}" for row in rows)
        where = f"{backend} {phase}, {window_of(rows[0].shape):,} of {rows[0].shape[3]:,.0f}"
        print(f"{where:46}{rows[0].ms:9.3f}{ratios}")
    header = f"{'':22}{'within 10%':>10}{'median':>10}{'rms (log)':>13}{'claimed':>11}"
    print(f"\n{header}{'in 90% int.':>15}")
    for name, items in found.items():
        print_shares(name, items)
        if name == CAUSAL:
            print_shares("  without one backward", [one for one in items if not computes_all(one)])


def print_shares(name: str, items: list[Scored]) -> None:
    errors = np.array([item.error for item in items])
    claimed = np.array([item.found.error for item in items])
    off = abs(np.expm1(errors))
    print(
        f"{name:22}{np.mean(off < 0.1):10.0%}{median(off):10.0%}"
        f"{np.sqrt(np.mean(errors**2)):13.2f}{np.sqrt(np.mean(claimed**2)):11.2f}"
        f"{np.mean(abs(errors) < Z90 * claimed):15.0%}"
    )


def computes_all(item: Scored) -> bool:
    """cuDNN's backward pass, which takes as long under any window (docs/forecast.md)."""
    return item.law.startswith("attention/cudnn_frontend/") and item.law.endswith("/backward")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "h200")
