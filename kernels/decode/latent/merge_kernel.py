"""Merges the pieces that a decode kernel left, in a launch of its own.

For kernels whose last program cannot merge (:mod:`kernels.decode.pieces`). Which lines are in
pieces, and where, follows from the lengths, which are read again.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode.pieces import merge_pieces
from kernels.decode.schedule import share_of, units_of, worker_of


@triton.jit(do_not_specialize=["batch_size", "num_workers", "min_units", "num_programs"])
def merge_kernel(
    lengths_ptr,
    out_ptr,
    pieces_ptr,
    out_stride_b,
    out_stride_h,
    out_stride_t,
    num_rows,
    batch_size,
    num_workers,
    min_units,
    num_programs,
    NEW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW_TILES: tl.constexpr,
    MERGE_PIECES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """Output of the lines that are in pieces; grid: sequences * ROW_TILES, BLOCK_M / MERGE_ROWS.

    ``num_programs`` are those that wrote the pieces.
    """
    sequence = tl.program_id(0) // ROW_TILES
    row_tile = tl.program_id(0) % ROW_TILES
    total, num_workers, _, _, _, _ = share_of(
        lengths_ptr, 0, num_workers, batch_size, 1, BLOCK_N, BLOCK_B, False, min_units
    )
    sequences = tl.arange(0, BLOCK_B)
    lengths = tl.load(lengths_ptr + sequences, mask=sequences < sequence, other=0)
    units = tl.where(sequences < sequence, units_of(lengths, BLOCK_N, False), 0)
    before = tl.sum(units, 0)
    after = before + units_of(tl.load(lengths_ptr + sequence), BLOCK_N, False)
    first_worker = worker_of(before, total, num_workers)
    last_worker = worker_of(after - 1, total, num_workers)
    if first_worker == last_worker:
        return
    tile_row = tl.program_id(1) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    row = row_tile * BLOCK_M + tile_row
    merge_pieces(
        pieces_ptr, num_programs, first_worker, last_worker, row_tile,
        out_ptr + tl.cast(sequence, tl.int64) * out_stride_b
        + row // NEW * out_stride_h + row % NEW * out_stride_t,
        tile_row, num_rows - row_tile * BLOCK_M, BLOCK_M, BLOCK_D, BLOCK_D,
        ROW_TILES, MERGE_PIECES, MERGE_ROWS, BLOCK_D, False, False,
    )  # fmt: skip
