"""Flash decode as one kernel: rotates and appends new tokens, attends, merges.

After Flash-Decoding (Dao, Haziza, Massa, Sizov 2023): the keys of a sequence are split, too.

The query heads that share a KV head, times the new tokens, are the rows of one tile: row
g * NEW + t is head g of the group at new token t. A cached key is so read once for all of them,
by ROW_TILES programs side by side if they are more than BLOCK_M. :mod:`kernels.decode.schedule`
says which keys a program visits. For each piece of a line in its share a program

1. loads and rotates its queries;
2. walks over the piece's tiles of cached keys, online softmax as in
   :mod:`kernels.flash.any_gpu.forward`; every query sees every cached key;
3. if the piece ends the line, rotates the new keys, writes them and the new values to the
   cache, and attends to them, causally, from registers: nobody waits for what it wrote, since
   cached keys are read below ``length`` only and new ones are written from there on;
4. writes the output, or its part of it, as :mod:`kernels.decode.pieces` says.

Decoding reads 2 D elements of the cache for 4 D flops of each row: with 4 rows and 16 bits, 4
flops a byte, where an H200 can do about 180 (790 TFLOP/s at 4.3 TB/s). Memory bandwidth is the
roof; tiles are padded to the 16 rows of a matmul instruction without loss.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode.cache_tiles import blocks_of, load_rotated, load_rows, tile_rows
from kernels.decode.pieces import is_last, merge_pieces, slot_of, store_piece
from kernels.decode.schedule import share_of, units_of, worker_of
from kernels.flash.any_gpu.tiles import dot, power


@triton.jit(
    do_not_specialize=["batch_size", "capacity", "max_positions", "num_workers", "min_units"]
)
def flash_decode_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    pieces_ptr,
    counters_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_new_stride_b,
    k_new_stride_h,
    k_new_stride_t,
    v_new_stride_b,
    v_new_stride_h,
    v_new_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    out_stride_b,
    out_stride_h,
    out_stride_t,
    table_stride,
    angle_stride,
    batch_size,
    capacity,
    max_positions,
    num_workers,
    min_units,
    unit_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NEW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROW_TILES: tl.constexpr,
    MERGE_PIECES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_COLUMNS: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Output and appended tokens of one worker's share; grid: num_workers * ROW_TILES.

    ``k_stride_b`` is a sequence's stride, or a block's if paged; ``unit_scale`` is the scale, times
    log2 e unless NATURAL.
    """
    worker = tl.program_id(0) // ROW_TILES
    row_tile = tl.program_id(0) % ROW_TILES
    total, num_workers, unit, stop, sequence, before = share_of(
        lengths_ptr, worker, num_workers, batch_size,
        NUM_KV_HEADS, BLOCK_N, BLOCK_B, True, min_units,
    )  # fmt: skip
    if worker >= num_workers:
        return
    tile_row = tl.arange(0, BLOCK_M)
    row = row_tile * BLOCK_M + tile_row
    token = row % NEW
    row_inside = row < GROUP_SIZE * NEW
    num_rows = GROUP_SIZE * NEW - row_tile * BLOCK_M

    while unit < stop:
        length = tl.load(lengths_ptr + sequence)
        units = units_of(length, BLOCK_N, True)
        kv_head = (unit - before) // units
        line_start = before + kv_head * units
        first = unit - line_start
        last = tl.minimum(units, stop - line_start)
        batch = tl.cast(sequence, tl.int64)
        head = tl.cast(kv_head, tl.int64)

        q_rows = (
            q_ptr + batch * q_stride_b
            + (kv_head * GROUP_SIZE + row // NEW) * q_stride_h + token * q_stride_t
        )  # fmt: skip
        q = load_rotated(
            q_rows, row_inside, length + token, cos_ptr, sin_ptr, angle_stride, max_positions,
            HEAD_DIM, BLOCK_D, ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        k_base = k_ptr + head * k_stride_h
        v_base = v_ptr + head * v_stride_h
        if PAGE == 0:
            k_base += batch * k_stride_b
            v_base += batch * v_stride_b
        sequence_table = table_ptr + batch * table_stride
        blocks = blocks_of(sequence_table, first, length, PAGE, BLOCK_N)
        for tile in range(first, tl.minimum(last, units - 1)):
            next_blocks = blocks_of(sequence_table, tile + 1, length, PAGE, BLOCK_N)
            inside = tile * BLOCK_N + tl.arange(0, BLOCK_N) < length
            k_rows = tile_rows(k_base, tile, blocks, k_stride_b, k_stride_n, PAGE, BLOCK_N)
            v_rows = tile_rows(v_base, tile, blocks, v_stride_b, v_stride_n, PAGE, BLOCK_N)
            k = load_rows(k_rows, inside, HEAD_DIM, BLOCK_D)
            v = load_rows(v_rows, inside, HEAD_DIM, BLOCK_D)
            acc, m, l = _attend(  # noqa: E741
                acc, m, l, q, k, v, inside[None, :], unit_scale, NATURAL, PRECISION, UPCAST
            )
            blocks = next_blocks

        if last == units:
            new = tl.arange(0, BLOCK_T)
            new_inside = new < NEW
            k_new_rows = k_new_ptr + batch * k_new_stride_b + head * k_new_stride_h
            v_new_rows = v_new_ptr + batch * v_new_stride_b + head * v_new_stride_h
            k = load_rotated(
                k_new_rows + new * k_new_stride_t, new_inside, length + new,
                cos_ptr, sin_ptr, angle_stride, max_positions,
                HEAD_DIM, BLOCK_D, ROTARY_DIM, INTERLEAVED,
            )  # fmt: skip
            v = load_rows(v_new_rows + new * v_new_stride_t, new_inside, HEAD_DIM, BLOCK_D)
            if row_tile == 0:
                position = length + new
                # The caller guarantees room; other sequences' memory is never written.
                fits = new_inside & (position < capacity)
                place = tl.cast(position, tl.int64)
                k_rows = k_base + place * k_stride_n
                v_rows = v_base + place * v_stride_n
                if PAGE > 0:
                    block = tl.load(sequence_table + position // PAGE, mask=fits, other=0)
                    block = tl.cast(block, tl.int64)
                    k_rows = k_base + block * k_stride_b + position % PAGE * k_stride_n
                    v_rows = v_base + block * v_stride_b + position % PAGE * v_stride_n
                columns = tl.arange(0, BLOCK_D)
                written = fits[:, None] & (columns < HEAD_DIM)[None, :]
                tl.store(k_rows[:, None] + columns[None, :], k, written)
                tl.store(v_rows[:, None] + columns[None, :], v, written)
            seen = (new[None, :] <= token[:, None]) & new_inside[None, :]
            acc, m, l = _attend(  # noqa: E741
                acc, m, l, q, k, v, seen, unit_scale, NATURAL, PRECISION, UPCAST
            )

        out_base = out_ptr + batch * out_stride_b
        if (first == 0) & (last == units):
            o = acc / l[:, None]
            out_rows = (
                out_base
                + (kv_head * GROUP_SIZE + row // NEW) * out_stride_h + token * out_stride_t
            )  # fmt: skip
            columns = tl.arange(0, BLOCK_D)
            tl.store(
                out_rows[:, None] + columns[None, :],
                o.to(out_ptr.dtype.element_ty),
                mask=row_inside[:, None] & (columns < HEAD_DIM)[None, :],
            )
        else:
            slot = slot_of(worker, row_tile, first > 0, ROW_TILES)
            store_piece(acc, m, l, pieces_ptr, slot, num_rows, BLOCK_M, BLOCK_D)
            first_worker = worker_of(line_start, total, num_workers)
            last_worker = worker_of(line_start + units - 1, total, num_workers)
            counter = (sequence * NUM_KV_HEADS + kv_head) * ROW_TILES + row_tile
            if is_last(counters_ptr + counter, last_worker - first_worker + 1):
                merge_row = tl.arange(0, MERGE_ROWS)
                out_row = row_tile * BLOCK_M + merge_row
                merge_pieces(
                    pieces_ptr, tl.num_programs(0), first_worker, last_worker, row_tile,
                    out_base + (kv_head * GROUP_SIZE + out_row // NEW) * out_stride_h
                    + out_row % NEW * out_stride_t,
                    merge_row, num_rows, BLOCK_M, BLOCK_D, HEAD_DIM,
                    ROW_TILES, MERGE_PIECES, MERGE_ROWS, MERGE_COLUMNS, True, NATURAL,
                )  # fmt: skip

        unit = line_start + last
        if unit == before + units * NUM_KV_HEADS:
            sequence += 1
            before = unit


@triton.jit
def _attend(
    acc,
    m,
    l,  # noqa: E741
    q,
    k,
    v,
    seen,
    unit_scale,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One step of the online softmax; every row sees at least one key of the tile.

    p, shrink and what l and acc are relative to all refer to m, one float32 value: its rounding
    cancels. The mask comes after the subtraction, which is fused with the product before it.
    """
    scores = dot(q, tl.trans(k), None, PRECISION, UPCAST) * unit_scale
    m_new = tl.maximum(m, tl.max(tl.where(seen, scores, float("-inf")), 1))
    p = tl.where(seen, power(scores - m_new[:, None], NATURAL), 0.0)
    shrink = power(m - m_new, NATURAL)
    l = l * shrink + tl.sum(p, 1)  # noqa: E741
    acc = dot(p.to(v.dtype), v, acc * shrink[:, None], PRECISION, UPCAST)
    return acc, m_new, l
