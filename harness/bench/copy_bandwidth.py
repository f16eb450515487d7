"""The device's memory bandwidth, from a large copy that each worker measures once.

It is the roof of work that moves many bytes and computes little, such as decoding. As in
task=roofline, one copy reads and writes each byte once, and the fastest pass counts.
"""

from __future__ import annotations

from functools import cache

import torch

from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer

COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Larger than any cache, and small beside the device's memory."""

PASSES = 20


def copy_bandwidth_gb_s(bench: Bench) -> float:
    """The bandwidth of this worker's device in GB/s (1e9 bytes), reads and writes together."""
    bench.stage("measuring the copy bandwidth")
    return measured_gb_s(bench.device.type, bench.device.index)


@cache
def measured_gb_s(kind: str, index: int | None) -> float:
    """The bandwidth of any device in GB/s.

    The copies are launched one by one: captured in a CUDA graph, a copy becomes a node of
    another kind, which may be slower.
    """
    device = torch.device(kind, index)
    # Random bits, since zeros cost less power; uint8 so that any size is whole.
    source = torch.randint(256, (COPY_BYTES[kind],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timer = PhaseTimer(device)
    for _ in range(PASSES):
        with timer.phase("copy"):
            target.copy_(source)
    if kind == "cuda":
        torch.cuda.synchronize(device)
    return 2 * COPY_BYTES[kind] / min(timer.collect()["copy"]) / 1e6
