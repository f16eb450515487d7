"""Predicted parts of profiled steps beside their kernels, without the model's own records.

python -m benchmarks.bench_breakdown [MODEL ATTENTION PRECISION SEQ_LEN [FIGURE.png]]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

import harness
from harness.forecast import build, steps
from harness.forecast.machines import GAPS, Machine
from harness.forecast.measured import MeasuredStep, of_frame
from harness.forecast.prediction import WAITING
from harness.paths import ROOT
from harness.render.figure import STYLE

STEPS = (("xl", "naive", "fp32", 512), ("medium", "sdpa", "bf16", 1024))

INNER = ("scores", "softmax", "final matmul")

BETWEEN = "between kernels"
"""Gaps, and waiting for the host, which a profile does not tell apart."""

PARTS = {
    "block/attention": "rotary embedding",
    "block/feed-forward": "feed-forward activation",
    "loss": "loss",
    "embedding": "embedding",
}
"""Parts of kernels by range, where they are no product, attention, norm or cast."""


def measured_parts(profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a profiled step's kernels, by the parts of forecasts."""
    found: dict[str, float] = defaultdict(float)
    for item in profile["rows"]:
        place, kind = item["range"] or "", item["category"]
        last = place.rsplit("/", 1)[-1]
        if kind == "attention" or last in INNER:
            part = "attention"
        elif kind == "matmul":
            part = "matmuls"
        elif item["phase"] == "optimizer":
            part = "optimizer"
        elif kind == "normalisation":
            part = "norms"
        elif kind == "elementwise" and place in ("block", ""):
            part = "residual stream"
        else:
            part = PARTS.get(place, "casts of autocast")
        found[part] += float(item["total_ms"]) / profile["steps"]
    return found


def draw(title: str, found: dict[str, float], kernels: dict[str, float], target: Path) -> None:
    """Predicted beside profiled milliseconds of each part that is 0.5% of the step or more."""
    least = 0.005 * sum(kernels.values())
    names = [name for name in {**found, **kernels} if max(_both(name, found, kernels)) >= least]
    names.sort(key=lambda name: max(_both(name, found, kernels)))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.42 * len(names) + 1.2), layout="constrained")
        axis = figure.subplots()
        for offset, values, label, tint in (
            (0.2, found, "predicted", "#0072B2"),
            (-0.2, kernels, "profiled", "#E69F00"),
        ):
            places = [place + offset for place in range(len(names))]
            times = [values.get(name, 0.0) for name in names]
            bars = axis.barh(places, times, height=0.38, color=tint, label=label)
            axis.bar_label(bars, [f"{ms:,.1f}" if ms else "" for ms in times], padding=3)
        axis.set_yticks(range(len(names)), names)
        axis.margins(x=0.12)
        axis.set_xlabel("milliseconds of a step")
        axis.set_title(title)
        axis.legend(loc="lower right")
        figure.savefig(target, dpi=150)


def _both(name: str, *values: dict[str, float]) -> list[float]:
    return [one.get(name, 0.0) for one in values]


def is_asked(step: MeasuredStep, asked: tuple[str, str, str, int]) -> bool:
    case = step.case
    assert case.model is not None, "training steps have a model"
    named = case.model.name, case.attention.name, case.precision.name, case.seq_len
    return named == asked and step.profile is not None and len(step.phases_ms) > 2


def main(asked: tuple[tuple[str, str, str, int], ...], target: Path | None = None) -> None:
    frame = harness.load(ROOT / "results" / "h200")
    plain, measured = build.kernels("h200", frame), of_frame(frame)
    for wanted in asked:
        step = next(step for step in measured if is_asked(step, wanted))
        alike = {one.case_id for one in measured if one.row["model"] == wanted[0]}
        kept = [one for one in measured if one.case_id not in alike]
        machine = Machine(steps.completed(build.without(plain, alike), kept))
        found = {part.name: part.ms for part in machine.step(step.case, host=step.host).parts}
        assert step.profile is not None, "asked steps are profiled"
        kernels = measured_parts(step.profile)
        kernels[BETWEEN] = max(0.0, step.ms - sum(kernels.values()))
        found[BETWEEN] = sum(found.pop(name, 0.0) for name in (GAPS, WAITING))
        print(f"\n{step.case.title}: {step.ms:.1f} ms\n{'':26}{'predicted':>10}{'measured':>10}")
        for name in sorted({*found, *kernels}, key=lambda name: -kernels.get(name, 0)):
            print(f"{name:26}{found.get(name, 0.0):10.1f}{kernels.get(name, 0.0):10.1f}")
        if target is not None:
            draw(f"{step.case.title}: {step.ms:.1f} ms", found, kernels, target)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(
        ((words[0], words[1], words[2], int(words[3])),) if words else STEPS,
        Path(words[4]) if len(words) > 4 else None,
    )
