"""What sustained load costs: clocks that a device's power limit lowers.

Kernels are calibrated in bursts of milliseconds, at full clocks. A training step whose tensor
cores are busy goes on until the device draws more power than it may, and lowers its clocks. Steps
of H100s and H200s take longer than their kernels by themselves the higher the rate of their
products: by nothing below a third of the fastest product's rate, and from half of it on by a share
that stays the same.
"""

from __future__ import annotations

import math

from harness.cases.case import Case
from harness.forecast.calibration import Calibration
from models import accounting

SLOWED = "lower clocks under load"

TENSOR_CORES = ("bfloat16", "float16", "tf32")
"""Formats of products that draw the power; on CUDA cores clocks stay."""

BEGINS, WHOLE = 0.32, 0.47
"""Shares of the fastest product's rate between which what load costs grows from nothing to all, as
seen on one H100 and on twelve hosts with an H200."""

USUAL = 0.07
"""Of the passes' time, where no step tells: between an H100's and an H200's."""

ERROR = 0.35
"""Standard error of what load costs, relative."""

UNMEASURED_ERROR = 0.6

UNMEASURED_NOTE = "no long step tells what sustained load costs"


def fastest(calibration: Calibration) -> dict[str, float]:
    """FLOPs a millisecond of the fastest product that was measured, by number format."""
    found = {}
    for dtype in TENSOR_CORES if calibration.device != "cpu" else ():
        observed = calibration.observations.get(f"matmul/{dtype}", ())
        rates = [2 * sum(map(math.prod, one.shapes)) / one.ms for one in observed if one.ms > 0]
        if rates:
            found[dtype] = max(rates)
    if "bfloat16" in found:
        # Both formats of 16 bits run at one rate.
        found.setdefault("float16", found["bfloat16"])
    return found


def load(flops_per_ms: float, fastest: float) -> float:
    """How far a step at a rate lowers a device's clocks: 0 to 1, of all that load costs."""
    return min(1.0, max(0.0, (flops_per_ms / fastest - BEGINS) / (WHOLE - BEGINS)))


def flops(case: Case) -> float:
    """FLOPs of one rank's step by formula, without what is computed again."""
    assert case.model is not None, "training steps have a model"
    trains = getattr(case.task, "mode", "train_step") != "forward"
    count = accounting.train_step_flops if trains else accounting.forward_flops
    whole = count(case.model, case.batch_size, case.seq_len, variant=case.attention_variant)
    return whole / (case.parallel.cp * case.parallel.tp)
