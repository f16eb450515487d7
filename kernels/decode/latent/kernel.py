"""Absorbed multi-latent attention over a latent cache as one kernel (DeepSeek-V2, section 2.1).

A cached token is one vector: RANK entries that are key and value at once, and ROPE_DIM more,
rotated, that are key only. All query heads, already multiplied by W_UK, share it: it is
attention with one KV head whose value is the first part of its key. Row h * NEW + t is head h
at new token t, and new token t sees the keys of positions up to its own. The tile of latents is
loaded once and multiplied twice, q c^T and p c. The ROW_TILES programs of the same share run
side by side, so that the cache is read from memory once and from L2 by the others.

The roof. A token and step cost 2 H (RANK + ROPE_DIM) + 2 H RANK flops and (RANK + ROPE_DIM)
elements: with 128 heads, rank 512 + 64 and 16 bits 278,528 flops for 1,152 bytes, 242 flops a
byte. An H200 that does 790 TFLOP/s and copies 4.3 TB/s turns at 184: the matmuls bind, not the
memory. At batch 32 and 16,384 tokens that is 185 us of matmul over 140 us of reading. With 64
heads, or 96, memory binds.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode.cache_tiles import blocks_of, load_rows, tile_rows
from kernels.decode.pieces import is_last, merge_pieces, slot_of, store_piece
from kernels.decode.schedule import share_of, units_of, worker_of
from kernels.flash.any_gpu.tiles import dot, power


@triton.jit(do_not_specialize=["batch_size", "num_workers", "min_units"])
def latent_decode_kernel(
    q_ptr,
    q_rope_ptr,
    cache_ptr,
    lengths_ptr,
    table_ptr,
    out_ptr,
    pieces_ptr,
    counters_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    q_rope_stride_b,
    q_rope_stride_h,
    q_rope_stride_t,
    cache_stride_b,
    cache_stride_n,
    out_stride_b,
    out_stride_h,
    out_stride_t,
    table_stride,
    batch_size,
    num_workers,
    min_units,
    unit_scale,
    NUM_HEADS: tl.constexpr,
    NEW: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_TILES: tl.constexpr,
    MERGE_PIECES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_COLUMNS: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Output of one worker's share; grid: num_workers * ROW_TILES.

    ``cache_stride_b`` is a sequence's stride, or a block's if paged; ``unit_scale`` is the
    scale, times log2 e unless NATURAL.
    """
    worker = tl.program_id(0) // ROW_TILES
    row_tile = tl.program_id(0) % ROW_TILES
    total, num_workers, unit, stop, sequence, before = share_of(
        lengths_ptr, worker, num_workers, batch_size, 1, BLOCK_N, BLOCK_B, False, min_units
    )
    if worker >= num_workers:
        return
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = row < NUM_HEADS * NEW
    num_rows = NUM_HEADS * NEW - row_tile * BLOCK_M

    while unit < stop:
        length = tl.load(lengths_ptr + sequence)
        units = units_of(length, BLOCK_N, False)
        first = unit - before
        last = tl.minimum(units, stop - before)
        batch = tl.cast(sequence, tl.int64)
        q = load_rows(
            q_ptr + batch * q_stride_b + row // NEW * q_stride_h + row % NEW * q_stride_t,
            row_inside, RANK, BLOCK_D,
        )  # fmt: skip
        q_rope = load_rows(
            q_rope_ptr + batch * q_rope_stride_b
            + row // NEW * q_rope_stride_h + row % NEW * q_rope_stride_t,
            row_inside, ROPE_DIM, BLOCK_ROPE,
        )  # fmt: skip
        num_seen = length - (NEW - 1) + row % NEW
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        base = cache_ptr
        if PAGE == 0:
            base += batch * cache_stride_b
        sequence_table = table_ptr + batch * table_stride
        blocks = blocks_of(sequence_table, first, length, PAGE, BLOCK_N)
        for tile in range(first, last):
            next_blocks = blocks_of(sequence_table, tile + 1, length, PAGE, BLOCK_N)
            key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = key < length
            rows = tile_rows(base, tile, blocks, cache_stride_b, cache_stride_n, PAGE, BLOCK_N)
            c = load_rows(rows, inside, RANK, BLOCK_D)
            k_rope = load_rows(rows + RANK, inside, ROPE_DIM, BLOCK_ROPE)
            scores = dot(q_rope, tl.trans(k_rope), None, PRECISION, UPCAST)
            scores = dot(q, tl.trans(c), scores, PRECISION, UPCAST) * unit_scale
            seen = key[None, :] < num_seen[:, None]
            m_new = tl.maximum(m, tl.max(tl.where(seen, scores, float("-inf")), 1))
            # An early new token may see no key of the piece: -inf - -inf is not a number.
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
            # As in the dense kernel: all refer to m, and the subtraction is fused with the product.
            p = tl.where(seen, power(scores - reference[:, None], NATURAL), 0.0)
            shrink = power(m - reference, NATURAL)
            l = l * shrink + tl.sum(p, 1)  # noqa: E741
            acc = dot(p.to(c.dtype), c, acc * shrink[:, None], PRECISION, UPCAST)
            m = m_new
            blocks = next_blocks

        out_base = out_ptr + batch * out_stride_b
        if (first == 0) & (last == units):
            # A query without any key: zero. NaN stays NaN.
            o = acc / tl.where(l == 0.0, 1.0, l)[:, None]
            columns = tl.arange(0, BLOCK_D)
            out_rows = out_base + row // NEW * out_stride_h + row % NEW * out_stride_t
            tl.store(
                out_rows[:, None] + columns[None, :],
                o.to(out_ptr.dtype.element_ty),
                mask=row_inside[:, None] & (columns < RANK)[None, :],
            )
        else:
            slot = slot_of(worker, row_tile, first > 0, ROW_TILES)
            store_piece(acc, m, l, pieces_ptr, slot, num_rows, BLOCK_M, BLOCK_D)
            first_worker = worker_of(before, total, num_workers)
            last_worker = worker_of(before + units - 1, total, num_workers)
            counter = sequence * ROW_TILES + row_tile
            if is_last(counters_ptr + counter, last_worker - first_worker + 1):
                merge_row = tl.arange(0, MERGE_ROWS)
                out_row = row_tile * BLOCK_M + merge_row
                merge_pieces(
                    pieces_ptr, tl.num_programs(0), first_worker, last_worker, row_tile,
                    out_base + out_row // NEW * out_stride_h + out_row % NEW * out_stride_t,
                    merge_row, num_rows, BLOCK_M, BLOCK_D, RANK,
                    ROW_TILES, MERGE_PIECES, MERGE_ROWS, MERGE_COLUMNS, True, NATURAL,
                )  # fmt: skip

        unit = before + last
        if last == units:
            sequence += 1
            before = unit
