"""FlashAttention-2's backward pass as three Triton kernels (CS336 assignment 2, equations 13-19).

The probabilities are computed again from the scores and the saved log-sum-exp. Two passes,
one for the keys' gradients and one for the queries', each write every result from a single
program: no atomics, so that two runs give the same bits, at 7 matmuls instead of 5.

Loop structure.

- ``row_terms_kernel``: one program per tile of queries. D = rowsum(o * do), less the gradient
  that reaches lse if there is one (dS = P * (dP - D + dlse)), and lse in units of log2, or
  as it is in float32 (see the forward pass). A query without any key gets lse plus infinity
  here, so that its probabilities come out as zero below and nothing else has to know about it.
- ``backward_dkv_kernel``: one program owns a tile of keys of one key head and keeps dk and dv
  in registers. It walks over the query heads of the group, and for each over the query tiles
  that see its keys: first those that the diagonal, the end of a window or the last query cuts,
  comparing indices, then the full ones. Scores are computed transposed, [keys, queries], so that
  both sums over queries are plain matmuls.
- ``backward_dq_kernel``: one program owns a tile of queries of one head and walks over key
  tiles exactly as the forward kernel does.

v, o, do and dv have VALUE_DIM columns, which may be fewer than HEAD_DIM, as in latent attention.

With ``chunk_rows`` a program of the last two walks over one chunk of its loop only, and gradients
get an axis of chunks, over which ``sum_kernel`` sums (:mod:`kernels.flash.any_gpu.chunks`).
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.flash.any_gpu.tiles import (
    LOG2_E,
    capped,
    dot,
    head_offset,
    load_tile,
    sequence_span,
    store_tile,
    visible_keys,
    within_chunk,
)


@triton.jit(do_not_specialize=["num_heads", "q_len", "num_q_tiles"])
def row_terms_kernel(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    row_lse_ptr,
    row_dots_ptr,
    o_stride_b,
    o_stride_h,
    o_stride_s,
    do_stride_b,
    do_stride_h,
    do_stride_s,
    num_heads,
    q_len,
    num_q_tiles,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """D, and lse in log2 unless NATURAL; lse, dlse and both results are contiguous [B, H, S]."""
    q_start = tl.program_id(0) % num_q_tiles * BLOCK_Q
    head = (tl.program_id(0) // num_q_tiles) % num_heads
    batch = tl.program_id(0) // num_q_tiles // num_heads
    rows_left = q_len - q_start
    o_ptr += head_offset(batch, head, q_start, o_stride_b, o_stride_h, o_stride_s)
    do_ptr += head_offset(batch, head, q_start, do_stride_b, do_stride_h, do_stride_s)
    row_offset = tl.cast(tl.program_id(0) // num_q_tiles, tl.int64) * q_len + q_start

    o = load_tile(o_ptr, o_stride_s, rows_left, BLOCK_Q, VALUE_DIM, BLOCK_DV, True)
    do = load_tile(do_ptr, do_stride_s, rows_left, BLOCK_Q, VALUE_DIM, BLOCK_DV, True)
    rows = tl.arange(0, BLOCK_Q)
    inside = rows < rows_left
    lse = tl.load(lse_ptr + row_offset + rows, mask=inside, other=0.0)
    row_dots = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        row_dots -= tl.load(dlse_ptr + row_offset + rows, mask=inside, other=0.0)
    has_key = lse != float("-inf")
    row_lse = tl.where(has_key, lse if NATURAL else lse * LOG2_E, float("inf"))
    tl.store(row_lse_ptr + row_offset + rows, row_lse, mask=inside)
    tl.store(row_dots_ptr + row_offset + rows, tl.where(has_key, row_dots, 0.0), mask=inside)


@triton.jit(
    do_not_specialize=[
        *("num_kv_heads", "q_len", "kv_len", "num_k_tiles", "window", "prefix_len", "shift"),
        "chunk_rows",
    ]
)
def backward_dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    row_lse_ptr,
    rest_ptr,
    row_dots_ptr,
    dk_ptr,
    dv_ptr,
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
    do_stride_b,
    do_stride_h,
    do_stride_s,
    dk_stride_b,
    dk_stride_h,
    dk_stride_s,
    dv_stride_b,
    dv_stride_h,
    dv_stride_s,
    row_stride_b,
    row_stride_h,
    chunk_stride,
    num_kv_heads,
    q_len,
    kv_len,
    num_k_tiles,
    window,
    prefix_len,
    shift,
    chunk_rows,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dk, dv of one tile of keys; grid: num_k_tiles * num_kv_heads * batch (or sequences), chunks.

    ``chunk_stride`` is that of the chunks of queries in dk, if there are any.
    """
    # Under a causal mask the first keys are seen by the most queries: already longest first.
    tile = tl.program_id(0) % num_k_tiles
    kv_head = (tl.program_id(0) // num_k_tiles) % num_kv_heads
    batch = tl.program_id(0) // num_k_tiles // num_kv_heads
    q_first, q_len = sequence_span(cu_seqlens_q_ptr, batch, q_len, PACKED)
    k_first, kv_len = sequence_span(cu_seqlens_k_ptr, batch, kv_len, PACKED)
    k_start = tile * BLOCK_K
    if k_start >= kv_len:
        return
    keys_left = kv_len - k_start
    k_row = k_first + k_start
    k_ptr += head_offset(batch, kv_head, k_row, k_stride_b, k_stride_h, k_stride_s)
    v_ptr += head_offset(batch, kv_head, k_row, v_stride_b, v_stride_h, v_stride_s)
    dk_ptr += head_offset(batch, kv_head, k_row, dk_stride_b, dk_stride_h, dk_stride_s)
    dv_ptr += head_offset(batch, kv_head, k_row, dv_stride_b, dv_stride_h, dv_stride_s)

    # Keys past the end are zeros; what they collect stays in their own rows, never stored.
    k = load_tile(k_ptr, k_stride_s, keys_left, BLOCK_K, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_ptr, v_stride_s, keys_left, BLOCK_K, VALUE_DIM, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)

    # Key j is seen by the queries from first_query[j] on, and under a window to before
    # end_query[j].
    end_query = None
    if CAUSAL or window is not None:
        offset = k_start - (kv_len - q_len)
        if shift is not None:
            offset -= shift
        if window is not None:
            end_query = offset + window + tl.arange(0, BLOCK_K)
            end_of_first = tl.minimum(tl.maximum(offset + window, 0), q_len)
            last_key = tl.minimum(BLOCK_K, keys_left) - 1
            stop = tl.minimum(tl.maximum(offset + window + last_key, 0), q_len)
            if not CAUSAL:
                offset -= window - 1
        first_query = offset + tl.arange(0, BLOCK_K)
        cut_start = tl.minimum(tl.maximum(offset, 0), q_len) // BLOCK_Q * BLOCK_Q
        full_start = tl.cdiv(tl.maximum(offset + BLOCK_K - 1, 0), BLOCK_Q) * BLOCK_Q
        if prefix_len is not None:
            in_prefix = k_start + tl.arange(0, BLOCK_K) < prefix_len
            first_query = tl.where(in_prefix, 0, first_query)
            cut_start = tl.where(k_start < prefix_len, 0, cut_start)
            full_start = tl.where(k_start + BLOCK_K <= prefix_len, 0, full_start)
    else:
        first_query = tl.zeros([BLOCK_K], tl.int32)
        cut_start = 0
        full_start = 0
    if window is not None:
        # Cut tiles lie at both ends of the window, or are all of it.
        full_end = end_of_first // BLOCK_Q * BLOCK_Q
        num_at_diagonal = tl.cdiv(tl.minimum(full_start, stop) - cut_start, BLOCK_Q)
        last_start = tl.maximum(full_start, full_end)
        num_cut = num_at_diagonal + tl.cdiv(tl.maximum(stop - last_start, 0), BLOCK_Q)
    else:
        full_end = q_len // BLOCK_Q * BLOCK_Q
        stop = q_len
        if chunk_rows is not None:
            chunk = tl.program_id(1)
            cut_start = within_chunk(cut_start, chunk, chunk_rows)
            full_start = within_chunk(full_start, chunk, chunk_rows)
            full_end = within_chunk(full_end, chunk, chunk_rows)
            stop = within_chunk(stop, chunk, chunk_rows)
            dk_ptr += tl.cast(chunk, tl.int64) * chunk_stride
            dv_ptr += tl.cast(chunk, tl.int64) * _of_values(chunk_stride, HEAD_DIM, VALUE_DIM)
        # Cut tiles lie at the diagonal, and at the end if the last tile is not a whole one.
        num_at_diagonal = tl.cdiv(tl.minimum(full_start, stop) - cut_start, BLOCK_Q)
        last_start = tl.maximum(full_start, full_end)
        num_cut = num_at_diagonal + tl.where(last_start < stop, 1, 0)

    for member in range(GROUP_SIZE):
        head = kv_head * GROUP_SIZE + member
        q_head = q_ptr + head_offset(batch, head, q_first, q_stride_b, q_stride_h, q_stride_s)
        do_head = do_ptr + head_offset(batch, head, q_first, do_stride_b, do_stride_h, do_stride_s)
        row_offset = head_offset(batch, head, q_first, row_stride_b, row_stride_h, 1)
        lse_head = row_lse_ptr + row_offset
        rest_head = rest_ptr + row_offset
        dots_head = row_dots_ptr + row_offset
        for index in range(num_cut):
            last = last_start
            if window is not None:
                last += (index - num_at_diagonal) * BLOCK_Q
            q_start = tl.where(index < num_at_diagonal, cut_start + index * BLOCK_Q, last)
            q_start = tl.multiple_of(q_start, BLOCK_Q)
            dk, dv = _add_queries(
                dk, dv, k, v, q_head, do_head, lse_head, rest_head, dots_head, q_stride_s,
                do_stride_s, q_start, q_len, first_query, end_query, scale, softcap, CAUSAL, True,
                HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_Q, NATURAL, PRECISION, UPCAST,
            )  # fmt: skip
        for q_start in range(full_start, full_end, BLOCK_Q):
            q_start = tl.multiple_of(q_start, BLOCK_Q)
            dk, dv = _add_queries(
                dk, dv, k, v, q_head, do_head, lse_head, rest_head, dots_head, q_stride_s,
                do_stride_s, q_start, q_len, first_query, end_query, scale, softcap, CAUSAL, False,
                HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_Q, NATURAL, PRECISION, UPCAST,
            )  # fmt: skip

    store_tile(dk * scale, dk_ptr, dk_stride_s, keys_left, BLOCK_K, HEAD_DIM, BLOCK_D)
    store_tile(dv, dv_ptr, dv_stride_s, keys_left, BLOCK_K, VALUE_DIM, BLOCK_DV)


@triton.jit
def _add_queries(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    row_lse_ptr,
    rest_ptr,
    row_dots_ptr,
    q_stride_s,
    do_stride_s,
    q_start,
    q_len,
    first_query,
    end_query,
    scale,
    softcap,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The additions of one tile of queries to dk (still to be scaled) and dv."""
    rows_left = q_len - q_start
    queries = q_start + tl.arange(0, BLOCK_Q)
    q = load_tile(
        q_ptr + tl.cast(q_start, tl.int64) * q_stride_s,
        q_stride_s, rows_left, BLOCK_Q, HEAD_DIM, BLOCK_D, MASKED,
    )  # fmt: skip
    do = load_tile(
        do_ptr + tl.cast(q_start, tl.int64) * do_stride_s,
        do_stride_s, rows_left, BLOCK_Q, VALUE_DIM, BLOCK_DV, MASKED,
    )  # fmt: skip
    if MASKED:
        row_lse = tl.load(row_lse_ptr + queries, mask=queries < q_len, other=float("inf"))
        row_dots = tl.load(row_dots_ptr + queries, mask=queries < q_len, other=0.0)
    else:
        row_lse = tl.load(row_lse_ptr + queries)
        row_dots = tl.load(row_dots_ptr + queries)
    scores = dot(k, tl.trans(q), None, PRECISION, UPCAST)
    unit_scale = scale if NATURAL else scale * LOG2_E
    if softcap is not None:
        shares = capped(scores, unit_scale, softcap)
        scores = shares * softcap
    else:
        scores = scores * unit_scale
    if NATURAL:
        rest = tl.load(rest_ptr + queries, mask=queries < q_len, other=0.0)
        p = tl.exp(scores - row_lse[None, :] - rest[None, :])
    else:
        p = tl.exp2(scores - row_lse[None, :])
    if MASKED and (CAUSAL or end_query is not None):
        is_seen = queries[None, :] >= first_query[:, None]
        if end_query is not None:
            is_seen = is_seen & (queries[None, :] < end_query[:, None])
        p = tl.where(is_seen, p, 0.0)
    dv = dot(p.to(do.dtype), do, dv, PRECISION, UPCAST)
    dp = dot(v, tl.trans(do), None, PRECISION, UPCAST)
    ds = p * (dp - row_dots[None, :])
    if softcap is not None:
        ds *= 1.0 - shares * shares
    dk = dot(ds.to(q.dtype), q, dk, PRECISION, UPCAST)
    return dk, dv


@triton.jit(
    do_not_specialize=[
        *("num_heads", "q_len", "kv_len", "num_q_tiles", "window", "prefix_len", "shift"),
        "chunk_rows",
    ]
)
def backward_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    row_lse_ptr,
    rest_ptr,
    row_dots_ptr,
    dq_ptr,
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
    do_stride_b,
    do_stride_h,
    do_stride_s,
    dq_stride_b,
    dq_stride_h,
    dq_stride_s,
    row_stride_b,
    row_stride_h,
    chunk_stride,
    num_heads,
    q_len,
    kv_len,
    num_q_tiles,
    window,
    prefix_len,
    shift,
    chunk_rows,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dq of one tile of queries; grid: num_q_tiles * num_heads * batch (or sequences), chunks."""
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
    do_ptr += head_offset(batch, head, q_row, do_stride_b, do_stride_h, do_stride_s)
    dq_ptr += head_offset(batch, head, q_row, dq_stride_b, dq_stride_h, dq_stride_s)
    row_offset = head_offset(batch, head, q_row, row_stride_b, row_stride_h, 1)

    rows = tl.arange(0, BLOCK_Q)
    inside = rows < rows_left
    q = load_tile(q_ptr, q_stride_s, rows_left, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    do = load_tile(do_ptr, do_stride_s, rows_left, BLOCK_Q, VALUE_DIM, BLOCK_DV, True)
    row_lse = tl.load(row_lse_ptr + row_offset + rows, mask=inside, other=float("inf"))
    rest = row_lse
    if NATURAL:
        rest = tl.load(rest_ptr + row_offset + rows, mask=inside, other=0.0)
    row_dots = tl.load(row_dots_ptr + row_offset + rows, mask=inside, other=0.0)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    first_seen, end_seen, start, full_start, full_end, stop = visible_keys(
        q_start, q_len, kv_len, window, prefix_len, shift, BLOCK_Q, BLOCK_K, CAUSAL
    )
    if chunk_rows is not None:
        chunk = tl.program_id(1)
        full_start = within_chunk(full_start, chunk, chunk_rows)
        full_end = within_chunk(full_end, chunk, chunk_rows)
        stop = within_chunk(stop, chunk, chunk_rows)
        dq_ptr += tl.cast(chunk, tl.int64) * chunk_stride
    if window is not None:
        dq = _add_keys(
            dq, q, do, row_lse, rest, row_dots, k_ptr, v_ptr, k_stride_s, v_stride_s, start,
            tl.minimum(full_start, stop), first_seen, end_seen, kv_len, scale, softcap, True,
            window is not None, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_K, NATURAL, PRECISION,
            UPCAST,
        )  # fmt: skip
    dq = _add_keys(
        dq, q, do, row_lse, rest, row_dots, k_ptr, v_ptr, k_stride_s, v_stride_s, full_start,
        full_end, first_seen, end_seen, kv_len, scale, softcap, False,
        window is not None, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_K, NATURAL, PRECISION,
        UPCAST,
    )  # fmt: skip
    dq = _add_keys(
        dq, q, do, row_lse, rest, row_dots, k_ptr, v_ptr, k_stride_s, v_stride_s, full_end,
        stop, first_seen, end_seen, kv_len, scale, softcap, True,
        window is not None, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_K, NATURAL, PRECISION,
        UPCAST,
    )  # fmt: skip
    store_tile(dq * scale, dq_ptr, dq_stride_s, rows_left, BLOCK_Q, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_keys(
    dq,
    q,
    do,
    row_lse,
    rest,
    row_dots,
    k_ptr,
    v_ptr,
    k_stride_s,
    v_stride_s,
    start,
    stop,
    first_seen,
    end_seen,
    kv_len,
    scale,
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
    """The additions of the key tiles from ``start`` to ``stop`` to dq, still to be scaled."""
    for k_start in range(start, stop, BLOCK_K):
        k_start = tl.multiple_of(k_start, BLOCK_K)
        k = load_tile(
            k_ptr + tl.cast(k_start, tl.int64) * k_stride_s,
            k_stride_s, kv_len - k_start, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED,
        )  # fmt: skip
        v = load_tile(
            v_ptr + tl.cast(k_start, tl.int64) * v_stride_s,
            v_stride_s, kv_len - k_start, BLOCK_K, VALUE_DIM, BLOCK_DV, MASKED,
        )  # fmt: skip
        scores = dot(q, tl.trans(k), None, PRECISION, UPCAST)
        unit_scale = scale if NATURAL else scale * LOG2_E
        if softcap is not None:
            shares = capped(scores, unit_scale, softcap)
            scores = shares * softcap
        else:
            scores = scores * unit_scale
        if NATURAL:
            p = tl.exp(scores - row_lse[:, None] - rest[:, None])
        else:
            p = tl.exp2(scores - row_lse[:, None])
        if MASKED:
            keys = k_start + tl.arange(0, BLOCK_K)
            is_seen = keys[None, :] < end_seen[:, None]
            if WINDOWED:
                is_seen = is_seen & (keys[None, :] >= first_seen[:, None])
            p = tl.where(is_seen, p, 0.0)
        dp = dot(do, tl.trans(v), None, PRECISION, UPCAST)
        ds = p * (dp - row_dots[:, None])
        if softcap is not None:
            ds *= 1.0 - shares * shares
        dq = dot(ds.to(k.dtype), k, dq, PRECISION, UPCAST)
    return dq


@triton.jit(do_not_specialize=["num_heads", "num_rows", "num_tiles", "num_chunks"])
def sum_kernel(
    first_parts_ptr,
    second_parts_ptr,
    first_ptr,
    second_ptr,
    first_stride_b,
    first_stride_h,
    first_stride_s,
    second_stride_b,
    second_stride_h,
    second_stride_s,
    chunk_stride,
    num_heads,
    num_rows,
    num_tiles,
    num_chunks,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One or two gradients, summed over chunks, the first chunk first.

    Grid: num_tiles * num_heads * batch, gradients. Their parts [chunks, B, H, S, D] are contiguous;
    the second has VALUE_DIM columns. ``chunk_stride`` is the first one's.
    """
    start = tl.program_id(0) % num_tiles * ROWS
    head = (tl.program_id(0) // num_tiles) % num_heads
    batch = tl.program_id(0) // num_tiles // num_heads
    rows_left = num_rows - start
    part = (tl.cast(tl.program_id(0) // num_tiles, tl.int64) * num_rows + start) * HEAD_DIM
    if tl.program_id(1) == 0:
        into = first_ptr
        into += head_offset(batch, head, start, first_stride_b, first_stride_h, first_stride_s)
        total = _sum_of(
            first_parts_ptr + part, chunk_stride, num_chunks, rows_left, HEAD_DIM, BLOCK_D, ROWS
        )
        store_tile(total, into, first_stride_s, rows_left, ROWS, HEAD_DIM, BLOCK_D)
    else:
        into = second_ptr
        into += head_offset(batch, head, start, second_stride_b, second_stride_h, second_stride_s)
        part = _of_values(part, HEAD_DIM, VALUE_DIM)
        chunk_stride = _of_values(chunk_stride, HEAD_DIM, VALUE_DIM)
        total = _sum_of(
            second_parts_ptr + part, chunk_stride, num_chunks, rows_left, VALUE_DIM, BLOCK_DV, ROWS
        )
        store_tile(total, into, second_stride_s, rows_left, ROWS, VALUE_DIM, BLOCK_DV)


@triton.jit
def _sum_of(
    parts_ptr,
    chunk_stride,
    num_chunks,
    rows_left,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """[ROWS, BLOCK_D] of all chunks together."""
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for chunk in range(num_chunks):
        part_ptr = parts_ptr + tl.cast(chunk, tl.int64) * chunk_stride
        total += load_tile(part_ptr, HEAD_DIM, rows_left, ROWS, HEAD_DIM, BLOCK_D, True)
    return total


@triton.jit
def _of_values(offset, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """The offset of a row of the contiguous dv, from that of the same row of dk."""
    if VALUE_DIM != HEAD_DIM:
        offset = offset // HEAD_DIM * VALUE_DIM
    return offset
