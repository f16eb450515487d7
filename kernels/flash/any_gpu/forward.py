"""FlashAttention-2's forward pass as one Triton kernel (CS336 assignment 2, Algorithm 1).

Loop structure. One program owns one tile of BLOCK_Q queries of one head and keeps, in
registers and float32, three running values for them: the largest scaled score ``m``, the
softmax denominator ``l`` relative to it, and the unnormalised output ``acc``. It walks over
the key tiles in order, in loops around the same body:

1. under a window, the tiles that its left edge cuts, from the first key that any query sees;
2. key tiles that every query of the tile sees entirely: no index is ever compared;
3. the tiles that the causal diagonal or the last key cuts: one comparison per score.

Tiles that no query sees are not visited. ``window``, ``prefix_len``, ``shift`` and ``softcap`` are
None in calls that have none, for which the compiler makes the same code as if they did not
exist. At the end o = acc / l and lse = m + log l. Scores
are in units of log2 inside (scale times log2 e is folded into one multiplication), because
the GPU has an instruction for 2^x and none for e^x.

In float32 they are in natural units, at one more multiplication per score: log2 e has more digits
than float32, and a score of thousands that is multiplied with it loses a rounding of the product,
which may be a thousandth. Where scale is a power of two they lose nothing so. In both units m is
one float32 value, a product rounded once, to which the probabilities, the shrinking of what was
summed before and lse all refer: an error in m cancels.

With ACCUMULATE the three values start from an earlier result instead of nothing: attention
over other keys, (o, lse), is the state m = lse, l = 1, acc = o.

With ``chunk_rows`` a program walks over one chunk of the keys only, and leaves its three values to
``merge_kernel``, which puts those of all chunks together (:mod:`kernels.flash.any_gpu.chunks`).

A program's queries of a grouped head read the keys of head // GROUP_SIZE; keys are never
expanded. Under a causal mask programs with the most keys are started first, so that the last
wave of the grid is a short one.

v and o have VALUE_DIM columns, padded to BLOCK_DV, which may be fewer than HEAD_DIM, those of q
and k, as in latent attention.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.flash.any_gpu.tiles import (
    LN_2,
    LOG2_E,
    capped,
    dot,
    head_offset,
    load_tile,
    power,
    rounded_away,
    sequence_span,
    store_tile,
    visible_keys,
    within_chunk,
)


@triton.jit(
    do_not_specialize=[
        *("num_heads", "q_len", "kv_len", "num_q_tiles", "window", "prefix_len", "shift"),
        "chunk_rows",
    ]
)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    rest_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    o_stride_b,
    o_stride_h,
    o_stride_s,
    o_stride_c,
    lse_stride_b,
    lse_stride_h,
    lse_stride_c,
    num_heads,
    q_len,
    kv_len,
    num_q_tiles,
    window,
    prefix_len,
    shift,
    chunk_rows,
    unit_scale,
    softcap,
    SCALE_SIGN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    NATURAL: tl.constexpr,
    GIVES_REST: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """o, lse of one tile of queries; grid: num_q_tiles * num_heads * batch (or sequences), chunks.

    ``unit_scale`` is |scale|, times log2 e unless NATURAL, and 1 when the scale is zero;
    ``softcap`` is in the same units; SCALE_SIGN is the scale's sign, or 0. GIVES_REST: what float32
    rounds away of lse goes to ``rest_ptr``, which is like lse; only if NATURAL. With ``chunk_rows``
    ``o_ptr``, ``lse_ptr`` and ``rest_ptr`` get acc, m and l instead, chunk after chunk.
    """
    tile = tl.program_id(0) % num_q_tiles
    if CAUSAL:
        tile = num_q_tiles - 1 - tile
    head = (tl.program_id(0) // num_q_tiles) % num_heads
    batch = tl.program_id(0) // num_q_tiles // num_heads
    q_first, q_len = sequence_span(cu_seqlens_q_ptr, batch, q_len, PACKED)
    k_first, kv_len = sequence_span(cu_seqlens_k_ptr, batch, kv_len, PACKED)
    q_start = tile * BLOCK_Q
    if q_start >= q_len:
        return
    rows_left = q_len - q_start
    q_row = q_first + q_start
    kv_head = head // GROUP_SIZE
    q_ptr += head_offset(batch, head, q_row, q_stride_b, q_stride_h, q_stride_s)
    k_ptr += head_offset(batch, kv_head, k_first, k_stride_b, k_stride_h, k_stride_s)
    v_ptr += head_offset(batch, kv_head, k_first, v_stride_b, v_stride_h, v_stride_s)
    o_ptr += head_offset(batch, head, q_row, o_stride_b, o_stride_h, o_stride_s)
    lse_ptr += head_offset(batch, head, q_row, lse_stride_b, lse_stride_h, 1)
    rest_ptr += head_offset(batch, head, q_row, lse_stride_b, lse_stride_h, 1)

    rows = tl.arange(0, BLOCK_Q)
    q = load_tile(q_ptr, q_stride_s, rows_left, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    if SCALE_SIGN != 1:
        # The loop takes the largest score before it scales, which needs a positive scale.
        q = (q.to(tl.float32) * SCALE_SIGN).to(q.dtype)

    if ACCUMULATE:
        lse = tl.load(lse_ptr + rows, mask=rows < rows_left, other=float("-inf"))
        seen_before = lse != float("-inf")
        m = lse if NATURAL else lse * LOG2_E
        l = tl.where(seen_before, 1.0, 0.0)  # noqa: E741
        acc = load_tile(o_ptr, o_stride_s, rows_left, BLOCK_Q, VALUE_DIM, BLOCK_DV, True)
        acc = tl.where(seen_before[:, None], acc, 0.0)
    else:
        m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_Q], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)

    first_seen, end_seen, start, full_start, full_end, stop = visible_keys(
        q_start, q_len, kv_len, window, prefix_len, shift, BLOCK_Q, BLOCK_K, CAUSAL
    )
    if chunk_rows is not None:
        chunk = tl.program_id(1)
        full_start = within_chunk(full_start, chunk, chunk_rows)
        full_end = within_chunk(full_end, chunk, chunk_rows)
        stop = within_chunk(stop, chunk, chunk_rows)
    if window is not None:
        acc, m, l = _visit_keys(  # noqa: E741
            acc, m, l, q, k_ptr, v_ptr, k_stride_s, v_stride_s, start,
            tl.minimum(full_start, stop), first_seen, end_seen, kv_len, unit_scale, softcap,
            True, window is not None, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_K, NATURAL,
            PRECISION, UPCAST,
        )  # fmt: skip
    acc, m, l = _visit_keys(  # noqa: E741
        acc, m, l, q, k_ptr, v_ptr, k_stride_s, v_stride_s, full_start, full_end, first_seen,
        end_seen, kv_len, unit_scale, softcap,
        False, window is not None, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_K, NATURAL,
        PRECISION, UPCAST,
    )  # fmt: skip
    acc, m, l = _visit_keys(  # noqa: E741
        acc, m, l, q, k_ptr, v_ptr, k_stride_s, v_stride_s, full_end, stop, first_seen,
        end_seen, kv_len, unit_scale, softcap,
        True, window is not None, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_K, NATURAL,
        PRECISION, UPCAST,
    )  # fmt: skip

    if chunk_rows is not None:
        o_ptr += tl.cast(chunk, tl.int64) * o_stride_c
        lse_ptr += tl.cast(chunk, tl.int64) * lse_stride_c
        rest_ptr += tl.cast(chunk, tl.int64) * lse_stride_c
        tl.store(lse_ptr + rows, m, mask=rows < rows_left)
        tl.store(rest_ptr + rows, l, mask=rows < rows_left)
        store_tile(acc, o_ptr, o_stride_s, rows_left, BLOCK_Q, VALUE_DIM, BLOCK_DV)
    else:
        _finish(
            acc, m, l, o_ptr, lse_ptr, rest_ptr, o_stride_s, rows_left, VALUE_DIM, BLOCK_DV,
            BLOCK_Q, NATURAL, GIVES_REST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads", "q_len", "num_q_tiles", "num_chunks"])
def merge_kernel(
    acc_ptr,
    m_ptr,
    l_ptr,
    o_ptr,
    lse_ptr,
    rest_ptr,
    o_stride_b,
    o_stride_h,
    o_stride_s,
    rows_of_chunk,
    num_heads,
    q_len,
    num_q_tiles,
    num_chunks,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NATURAL: tl.constexpr,
    GIVES_REST: tl.constexpr,
):
    """o, lse of one tile of queries from all chunks; grid: num_q_tiles * num_heads * batch.

    m, l [chunks, B, H, S] and acc, which has a last axis of VALUE_DIM more, are contiguous, like
    lse; ``rows_of_chunk`` is B * H * S.
    """
    q_start = tl.program_id(0) % num_q_tiles * BLOCK_Q
    head = (tl.program_id(0) // num_q_tiles) % num_heads
    batch = tl.program_id(0) // num_q_tiles // num_heads
    rows_left = q_len - q_start
    row = tl.cast(tl.program_id(0) // num_q_tiles, tl.int64) * q_len + q_start
    o_ptr += head_offset(batch, head, q_start, o_stride_b, o_stride_h, o_stride_s)

    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_DV)
    inside = rows < rows_left
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    for chunk in range(num_chunks):
        chunk_row = tl.cast(chunk, tl.int64) * rows_of_chunk + row
        m_chunk = tl.load(m_ptr + chunk_row + rows, mask=inside, other=float("-inf"))
        l_chunk = tl.load(l_ptr + chunk_row + rows, mask=inside, other=0.0)
        # Half of the chunks are past the diagonal of a causal mask: nothing is read of those.
        pointers = acc_ptr + (chunk_row + rows)[:, None] * VALUE_DIM + columns[None, :]
        is_needed = (l_chunk != 0.0)[:, None] & (columns[None, :] < VALUE_DIM)
        acc_chunk = tl.load(pointers, mask=is_needed, other=0.0)
        m_new = tl.maximum(m, m_chunk)
        # Minus infinity less itself is not a number.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        before = power(m - reference, NATURAL)
        added = power(m_chunk - reference, NATURAL)
        l = l * before + l_chunk * added  # noqa: E741
        acc = acc * before[:, None] + acc_chunk * added[:, None]
        m = m_new
    _finish(
        acc, m, l, o_ptr, lse_ptr + row, rest_ptr + row, o_stride_s, rows_left, VALUE_DIM, BLOCK_DV,
        BLOCK_Q, NATURAL, GIVES_REST,
    )  # fmt: skip


@triton.jit
def _finish(
    acc,
    m,
    l,  # noqa: E741
    o_ptr,
    lse_ptr,
    rest_ptr,
    o_stride_s,
    rows_left,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NATURAL: tl.constexpr,
    GIVES_REST: tl.constexpr,
):
    """Store o, lse and, if asked for, what float32 rounds away of it, of the three values."""
    rows = tl.arange(0, BLOCK_Q)
    # A query without any key, whose total is exactly zero: zero and minus infinity. A total that
    # is not a number is a key's, and stays one in both results.
    no_key = l == 0.0
    l = tl.where(no_key, 1.0, l)  # noqa: E741
    log_l = tl.log(l)
    lse = (m if NATURAL else m * LN_2) + log_l
    tl.store(lse_ptr + rows, tl.where(no_key, float("-inf"), lse), mask=rows < rows_left)
    if GIVES_REST:
        rest = tl.where(no_key, 0.0, rounded_away(m, log_l, lse))
        tl.store(rest_ptr + rows, rest, mask=rows < rows_left)
    store_tile(acc / l[:, None], o_ptr, o_stride_s, rows_left, BLOCK_Q, VALUE_DIM, BLOCK_DV)


@triton.jit
def _visit_keys(
    acc,
    m,
    l,  # noqa: E741
    q,
    k_ptr,
    v_ptr,
    k_stride_s,
    v_stride_s,
    start,
    stop,
    first_seen,
    end_seen,
    kv_len,
    unit_scale,
    softcap,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Online softmax over the key tiles from ``start`` to ``stop``."""
    for k_start in range(start, stop, BLOCK_K):
        k_start = tl.multiple_of(k_start, BLOCK_K)
        k = load_tile(
            k_ptr + tl.cast(k_start, tl.int64) * k_stride_s,
            k_stride_s, kv_len - k_start, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED,
        )  # fmt: skip
        scores = dot(q, tl.trans(k), None, PRECISION, UPCAST)
        if softcap is not None:
            # Already in the units of exponents, unlike scores that have no cap.
            scores = capped(scores, unit_scale, softcap) * softcap
        if MASKED:
            keys = k_start + tl.arange(0, BLOCK_K)
            is_seen = keys[None, :] < end_seen[:, None]
            if WINDOWED:
                is_seen = is_seen & (keys[None, :] >= first_seen[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        if softcap is None:
            m_new = tl.maximum(m, tl.max(scores, 1) * unit_scale)
        else:
            m_new = tl.maximum(m, tl.max(scores, 1))
        if MASKED:  # noqa: SIM108
            # Minus infinity less itself is not a number; a query may have seen nothing yet.
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            reference = m_new
        if softcap is None:
            p = power(scores * unit_scale - reference[:, None], NATURAL)
        else:
            p = power(scores - reference[:, None], NATURAL)
        correction = power(m - reference, NATURAL)
        l = l * correction + tl.sum(p, 1)  # noqa: E741
        acc = acc * correction[:, None]
        v = load_tile(
            v_ptr + tl.cast(k_start, tl.int64) * v_stride_s,
            v_stride_s, kv_len - k_start, BLOCK_K, VALUE_DIM, BLOCK_DV, MASKED,
        )  # fmt: skip
        acc = dot(p.to(v.dtype), v, acc, PRECISION, UPCAST)
        m = m_new
    return acc, m, l
