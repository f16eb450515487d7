"""The device's matmul rate, from a large product that each worker measures once.

It is the roof of work that computes much and moves few bytes, such as latent attention. As in
task=roofline, which measures the same product, the fastest pass counts.
"""

from __future__ import annotations

from functools import cache

import torch

from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of both factors: enough to keep all cores busy."""

PASSES = {"cpu": 5, "cuda": 20}


def matmul_tflops(bench: Bench, dtype: str) -> float:
    """The rate of this worker's device in TFLOP/s (1e12 operations), in ``dtype``."""
    bench.stage("measuring the matmul rate")
    return measured_tflops(
        bench.device.type, bench.device.index, dtype, torch.get_float32_matmul_precision()
    )


@cache
def measured_tflops(kind: str, index: int | None, dtype: str, float32_precision: str) -> float:
    """The rate of any device in TFLOP/s; ``float32_precision`` is torch's present setting."""
    device, size = torch.device(kind, index), MATMUL_SIZE[kind]
    # Normal numbers, since zeros cost less power.
    left, right = (
        torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2)
    )
    product = torch.empty_like(left)
    timer = PhaseTimer(device)
    for _ in range(PASSES[kind]):
        with timer.phase("matmul"):
            torch.matmul(left, right, out=product)
    if kind == "cuda":
        torch.cuda.synchronize(device)
    return 2 * size**3 / min(timer.collect()["matmul"]) / 1e9
