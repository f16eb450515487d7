"""Partial results of lines that several workers share, and their merge by the last to finish.

A worker that holds a piece of a line writes the state of its softmax (the weighted sum of values,
the maximum m that it is relative to, and the sum of the weights, in float32) to its own slot, and
then counts itself in with one atomic addition. Whoever counts in last reads all slots of the line,
in the order of the keys, and writes the merged output: one launch, no waiting, and equal bits
whoever is last. A log-sum-exp in place of m and the sum would be rounded: at scores of thousands
by a thousandth, which the piece's weight would be off by.

The addition releases what its program wrote and acquires what the others did, at the scope of
the device; the barrier before it puts the stores of all threads before the one thread that adds
(PTX ISA, memory consistency model: causality order). The last one sets the counter back to
zero, so that the next launch on the stream finds it so.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_of(worker, row_tile, continues, ROW_TILES: tl.constexpr):
    """A worker's first piece may continue a line (slot 0), its last may begin one (slot 1)."""
    return (worker * ROW_TILES + row_tile) * 2 + tl.where(continues, 0, 1)


@triton.jit
def store_piece(
    acc,
    m,
    l,  # noqa: E741
    pieces_ptr,
    slot,
    num_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """acc [BLOCK_M, BLOCK_D], m and l [BLOCK_M] of the first ``num_rows`` rows to a slot."""
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    inside = rows < num_rows
    first = tl.cast(slot, tl.int64) * BLOCK_M
    num_places = tl.cast(tl.num_programs(0), tl.int64) * 2 * BLOCK_M
    m_ptr = pieces_ptr + num_places * BLOCK_D
    tl.store(m_ptr + first + rows, m, mask=inside)
    tl.store(m_ptr + num_places + first + rows, l, mask=inside)
    places = pieces_ptr + first * BLOCK_D + rows[:, None] * BLOCK_D + columns[None, :]
    tl.store(places, acc, mask=inside[:, None])


@triton.jit
def is_last(counter_ptr, num_pieces):
    """Counts this program in; whether all others of the line have been before it."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == num_pieces - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def merge_pieces(
    pieces_ptr,
    num_programs,
    first_worker,
    last_worker,
    row_tile,
    out_rows,
    rows,
    num_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_TILES: tl.constexpr,
    MERGE_PIECES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """The merged output of one line's rows to memory.

    MERGE_PIECES slots are read at a time, for they are as far away as the L2 cache.

    Args:
        num_programs: those that wrote the pieces, with two slots each.
        out_rows: pointers [MERGE_ROWS] to the rows of the output; rows: their numbers.
        SUMS: pieces are as :func:`store_piece` writes them; else normalised outputs, each with
            its log-sum-exp in the place of m, and nothing in that of the sum.
        NATURAL: m is in natural units, else in those of log2.
    """
    num_places = tl.cast(num_programs, tl.int64) * 2 * BLOCK_M
    m_ptr = pieces_ptr + num_places * BLOCK_D
    for first_column in range(0, BLOCK_D, MERGE_COLUMNS):
        columns = first_column + tl.arange(0, MERGE_COLUMNS)
        top = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([MERGE_ROWS], tl.float32)
        merged = tl.zeros([MERGE_ROWS, MERGE_COLUMNS], tl.float32)
        for first in range(first_worker, last_worker + 1, MERGE_PIECES):
            workers = first + tl.arange(0, MERGE_PIECES)
            # Only the first worker's piece begins the line.
            slots = slot_of(workers, row_tile, workers != first_worker, ROW_TILES)
            places = tl.cast(slots, tl.int64)[:, None] * BLOCK_M + rows[None, :]
            inside = (workers <= last_worker)[:, None] & (rows < num_rows)[None, :]
            # From L2: this multiprocessor's L1 may hold what a slot was before.
            m = tl.load(m_ptr + places, mask=inside, other=float("-inf"), cache_modifier=".cg")
            o = tl.load(
                pieces_ptr + places[:, :, None] * BLOCK_D + columns[None, None, :],
                mask=inside[:, :, None], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(m, 0))
            reference = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights, shrink = m - reference[None, :], top - reference
            if NATURAL:
                weights, shrink = tl.exp(weights), tl.exp(shrink)
            else:
                weights, shrink = tl.exp2(weights), tl.exp2(shrink)
            sums = weights
            if SUMS:
                l = tl.load(  # noqa: E741
                    m_ptr + num_places + places, mask=inside, other=0.0, cache_modifier=".cg"
                )
                sums = weights * l
            total = total * shrink + tl.sum(sums, 0)
            merged = merged * shrink[:, None] + tl.sum(weights[:, :, None] * o, 0)
            top = new_top
        merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_rows[:, None] + columns[None, :],
            merged.to(out_rows.dtype.element_ty),
            mask=(rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :],
        )
