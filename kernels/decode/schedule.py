"""How the keys of a batch are divided among the programs of one launch, on the device.

A *line* is one sequence and one KV head: queries that attend to the same keys. Its *units* are
its tiles of BLOCK_N keys (and, where the kernel appends, one more for the new tokens). All
units of all lines, one line after another, are cut into equal shares, one for each *worker*:
worker w of W gets the units from floor(w U / W) to floor((w + 1) U / W). So every worker has the
same work whatever the lengths, as in Stream-K (Osama et al. 2023, arXiv:2301.03598), and the
grid depends on no length: a captured CUDA graph stays right when the lengths change. The part
of a line in one share is a *piece*; a share has at most two pieces that are not whole lines, its
first and its last, which bounds the memory for partial results by the number of workers.

Workers beyond the number of units, or of shares of ``min_units`` units, have nothing to do.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def units_of(length, BLOCK_N: tl.constexpr, APPENDS: tl.constexpr):
    """Units of a line whose cache holds ``length`` tokens; at least one, which writes zeros."""
    tiles = (tl.maximum(length, 0) + BLOCK_N - 1) // BLOCK_N
    return tiles + 1 if APPENDS else tl.maximum(tiles, 1)


@triton.jit
def share_of(
    lengths_ptr,
    worker,
    num_workers,
    batch_size,
    NUM_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    APPENDS: tl.constexpr,
    min_units,
):
    """One worker's share.

    Returns:
        total: units of the whole batch; num_workers: those with work, the share of any other
        being of no meaning; start, stop: the share; sequence: that of its first unit;
        before: units of the sequences before that one.
    """
    sequences = tl.arange(0, BLOCK_B)
    inside = sequences < batch_size
    lengths = tl.load(lengths_ptr + sequences, mask=inside, other=0)
    units = tl.where(inside, units_of(lengths, BLOCK_N, APPENDS) * NUM_HEADS, 0)
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    num_workers = tl.minimum(num_workers, tl.maximum(total // min_units, 1))
    start = (tl.cast(worker, tl.int64) * total // num_workers).to(tl.int32)
    stop = ((tl.cast(worker, tl.int64) + 1) * total // num_workers).to(tl.int32)
    passed = ends <= start
    sequence = tl.sum(tl.where(passed & inside, 1, 0), 0)
    before = tl.sum(tl.where(passed, units, 0), 0)
    return total, num_workers, start, stop, sequence, before


@triton.jit
def worker_of(unit, total, num_workers):
    """The worker that has a unit: the largest w with floor(w total / num_workers) <= unit."""
    return (((tl.cast(unit, tl.int64) + 1) * num_workers - 1) // total).to(tl.int32)
