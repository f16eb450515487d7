"""Kernels around the Hopper backward pass: row statistics before it, sums after it."""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.flash.hopper.tiles import LOG2_E, PROGRAM_ROWS, ROWS


@triton.jit
def sequence_of_block(cu_seqlens, batch_size, block, BLOCK: tl.constexpr):
    """The sequence of a block of rows, and its number in it: tiles.sequence_of_program, in Triton.

    A block before the first sequence gets a number below zero.
    """
    first = 0
    end = batch_size
    while end - first > 1:
        middle = (first + end) // 2
        begins_before = tl.load(cu_seqlens + middle) // BLOCK + middle <= block
        first = tl.where(begins_before, middle, first)
        end = tl.where(begins_before, end, middle)
    return first, block - (tl.load(cu_seqlens + first) // BLOCK + first)


@triton.jit(do_not_specialize=["batch_size", "num_key_counts"])
def row_statistics(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    statistics_ptr,
    counts_ptr,
    key_counts_ptr,
    cu_seqlens_q,
    stride_ob,
    stride_oh,
    stride_os,
    stride_dob,
    stride_doh,
    stride_dos,
    batch_size,
    num_heads,
    q_len,
    lse_len,
    padded_len,
    plane,
    num_key_counts,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Write lse in units of log2, and minus delta = dlse - rowsum(o * do), for every query row.

    Minus, as the products dO V^T start from it. Both are [lines, padded_len], where each sequence
    begins at a multiple of BLOCK_Q (tiles.sequence) and is filled up to one. A row without keys, or
    beyond the end, gets lse = +inf, so that its probabilities come out as exp2(-inf) = 0. The
    counts of programs that have added to each 64 rows of dQ begin at zero, of all ``SUMS`` of it,
    and so do ``num_key_counts`` of dK and dV.
    """
    block = tl.program_id(0)
    index = tl.program_id(1) * tl.num_programs(0) + block
    num_programs = tl.num_programs(0) * tl.num_programs(1)
    # In blocks: rows of the whole grid can be beyond 2^31.
    for of_keys in range(index, tl.cdiv(num_key_counts, BLOCK_Q), num_programs):
        place = of_keys * BLOCK_Q + tl.arange(0, BLOCK_Q)
        tl.store(key_counts_ptr + place, tl.zeros([BLOCK_Q], tl.int32), place < num_key_counts)
    head = tl.program_id(1) % num_heads
    batch = tl.program_id(1) // num_heads
    start = 0
    out_start = 0
    if PACKED:
        batch, block = sequence_of_block(cu_seqlens_q, batch_size, block, BLOCK_Q)
        start = tl.load(cu_seqlens_q + batch)
        q_len = tl.load(cu_seqlens_q + batch + 1) - start
        out_start = (start + BLOCK_Q * batch) // BLOCK_Q * BLOCK_Q
        batch = 0
    if (block < 0) | (block * BLOCK_Q >= q_len):
        return
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    column = tl.arange(0, BLOCK_V)
    inside = row < q_len
    mask = inside[:, None] & (column < VALUE_DIM)[None, :]
    rows = (start + row).to(tl.int64)[:, None]
    batch = tl.cast(batch, tl.int64)
    o_base = batch * stride_ob + head.to(tl.int64) * stride_oh
    do_base = batch * stride_dob + head.to(tl.int64) * stride_doh
    o = tl.load(o_ptr + o_base + rows * stride_os + column[None, :], mask=mask, other=0.0)
    do = tl.load(do_ptr + do_base + rows * stride_dos + column[None, :], mask=mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    line = batch * num_heads + head
    base = line * lse_len + start
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + base + row, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + base + row, mask=inside, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    out = statistics_ptr + line * padded_len + out_start + row
    tl.store(out, lse)
    tl.store(out + plane, -delta)
    PER_BLOCK: tl.constexpr = BLOCK_Q // ROWS
    counts = counts_ptr + (line * padded_len + out_start) // ROWS + block * PER_BLOCK
    for _ in tl.static_range(SUMS):
        tl.store(counts + tl.arange(0, PER_BLOCK), tl.zeros([PER_BLOCK], tl.int32))
        counts += plane // ROWS


@triton.jit
def is_reached(
    turn,
    q_len,
    kv_len,
    window,
    prefix_len,
    shift,
    TURN: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Whether any program comes to a turn; the sums of one that none comes to are never written.

    backward_order.turns_of_keys says which turns a tile of keys comes to.
    """
    reached = turn * 0 + kv_len > 0
    first = turn * TURN + kv_len - q_len
    if MASK != "plain":
        first += shift
    last = first + TURN - 1
    if MASK == "window":
        # The first key that the first query sees lies before the end of the last tile.
        reached = reached & (first - window + 1 < tl.cdiv(kv_len, TURN) * TURN)
        if not CAUSAL:
            last += window - 1
    if MASK == "prefix":
        last = tl.maximum(last, prefix_len - 1)
    if CAUSAL or MASK == "window":
        reached = reached & (last >= 0)
    return reached


@triton.jit
def is_reached_by_later(turn, q_len, kv_len, num_turned, TURN: tl.constexpr):
    """Whether a program of keys behind the first ``num_turned`` tiles comes to a turn.

    Under a causal mask that hides nothing else (backward_schedule.keys_turned).
    """
    first = num_turned * TURN
    last_key = turn * TURN + TURN - 1 + kv_len - q_len
    return (last_key >= first) & (kv_len > first)


@triton.jit(do_not_specialize=["batch_size", "turns_apart", "window", "prefix_len", "shift"])
def finish_dq(
    sums_ptr,
    dq_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    stride_qb,
    stride_qh,
    stride_qs,
    batch_size,
    num_heads,
    q_len,
    kv_len,
    padded_len,
    plane,
    turns_apart,
    window,
    prefix_len,
    shift,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TURN: tl.constexpr,
    PACKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """dQ = scale * its sum, in rows and columns again, and zero where a query sees no key.

    Where there are several ``SUMS`` of dQ, each is ``plane`` rows behind the one before, and begins
    ``turns_apart`` turns behind it: the second is of keys behind so many tiles, or each of a band.
    """
    block = tl.program_id(0)
    head = tl.program_id(1) % num_heads
    batch = tl.program_id(1) // num_heads
    start = 0
    sums_start = 0
    if PACKED:
        batch, block = sequence_of_block(cu_seqlens_q, batch_size, block, BLOCK_Q)
        start = tl.load(cu_seqlens_q + batch)
        q_len = tl.load(cu_seqlens_q + batch + 1) - start
        kv_len = tl.load(cu_seqlens_k + batch + 1) - tl.load(cu_seqlens_k + batch)
        sums_start = (start + PROGRAM_ROWS * batch) // PROGRAM_ROWS * PROGRAM_ROWS
        batch = 0
    if (block < 0) | (block * BLOCK_Q >= q_len):
        return
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    seen = is_reached(
        row // TURN, q_len, kv_len, window, prefix_len, shift, TURN, CAUSAL, MASK
    )  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    mask = (row < q_len)[:, None] & (column < HEAD_DIM)[None, :]
    batch = tl.cast(batch, tl.int64)
    line = batch * num_heads + head
    sums = sums_ptr + (line * padded_len + sums_start) * BLOCK_D
    # backward_order.by_thread: row and column of a tile of 64 by 64 by warp, group of four
    # threads, thread, and register (the accumulator of wgmma, PTX ISA, figure of wgmma .m64nNk16).
    tile = (row // 64)[:, None] * (BLOCK_D // 64) + (column // 64)[None, :]
    thread = (row % 64 // 16 * 32 + row % 8 * 4)[:, None] + (column % 8 // 2)[None, :]
    register = (row % 16 // 8 * 2)[:, None] + (column % 2)[None, :]
    place = tile * 4096 + (column % 64 // 8)[None, :] * 512 + thread * 4 + register
    dq = tl.load(sums + place, mask=mask & seen[:, None], other=0.0)
    for further in tl.static_range(1, SUMS):
        later = is_reached_by_later(row // TURN, q_len, kv_len, further * turns_apart, TURN)
        place += tl.cast(plane, tl.int64) * BLOCK_D
        dq += tl.load(sums + place, mask=mask & later[:, None], other=0.0)
    dq *= scale
    out = dq_ptr + batch * stride_qb + head.to(tl.int64) * stride_qh
    rows = (start + row).to(tl.int64)[:, None] * stride_qs
    tl.store(out + rows + column[None, :], dq.to(dq_ptr.dtype.element_ty), mask=mask)
