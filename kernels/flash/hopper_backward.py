"""FlashAttention backward for Hopper (compute capability 9.0) in Gluon: two passes, no atomics.

Both recompute the probabilities from the log-sum-exp, P = exp(S - lse), and the gradient of the
scores, dS = P * (dP - delta) with dP = dO V^T and delta = rowsum(O * dO) (FlashAttention-2,
arXiv:2307.08691, algorithm 2).

- ``flash_backward_dkdv``: one program has 128 keys of one key head, and loops
  over the queries that see them, of every query head of the group. It computes the transposes,
  S^T = K Q^T and dP^T = V dO^T, because then P^T and dS^T come out of the tensor core in the
  registers from which dV += P^T dO and dK += dS^T Q read them.
- ``flash_backward_dq``: one program has 128 queries and loops over the keys that
  they see: dQ += dS K.

Roles are those of the forward pass: a producer warp fills rings in shared memory by TMA, and each
consumer warpgroup works on 64 rows of its own. A single pass would need five matmuls per tile
where these need seven, but has to add up dQ across programs.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.flash.hopper_tiles import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    LOG2_E,
    ROWS,
    key_tiles,
    sequence,
    store_rows,
    visible_keys,
)


@triton.jit
def row_statistics(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    statistics_ptr,
    cu_seqlens_q,
    stride_ob,
    stride_oh,
    stride_os,
    stride_dob,
    stride_doh,
    stride_dos,
    num_heads,
    q_len,
    lse_len,
    padded_len,
    plane,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """For every query row lse in units of log2, and delta = rowsum(o * do) - dlse.

    Rows of a dense batch are padded to ``padded_len``; each sequence of a packed one begins at a
    multiple of four. A row without keys, or beyond the end, gets lse = +inf, so that its
    probabilities come out as exp2(-inf) = 0.
    """
    row = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1) % num_heads
    batch = tl.program_id(1) // num_heads
    start = 0
    out_start = 0
    end = padded_len
    if PACKED:
        start = tl.load(cu_seqlens_q + batch)
        q_len = tl.load(cu_seqlens_q + batch + 1) - start
        out_start = (start + 4 * batch) // 4 * 4
        end = q_len
        batch = 0
    column = tl.arange(0, BLOCK_D)
    inside = row < q_len
    mask = inside[:, None] & (column < HEAD_DIM)[None, :]
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
    tl.store(out, lse, mask=row < end)
    tl.store(out + plane, delta, mask=row < end)


@gluon.jit
def query_tile(step, first_tile, num_tiles, num_diagonal, num_masked):
    """The query tile of a step: those on the diagonal, then a ragged last one, then the rest."""
    tile = first_tile + step
    if num_masked > num_diagonal:
        tile = gl.where(step == num_diagonal, num_tiles - 1, tile)
        tile = gl.where(step > num_diagonal, first_tile + step - 1, tile)
    return tile


@gluon.jit
def produce_queries(inputs, STAGES: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Keys and values once; then per query tile Q, dO and the two row statistics."""
    (
        q_desc, do_desc, k_desc, v_desc, stat_desc, k_tiles, v_tiles, q_tiles, do_tiles,
        lse_tiles, delta_tiles, kv_ready, q_ready, do_ready, free, batch, kv_head, num_heads,
        group_size, first, q_start, k_start, line_start, first_tile, num_tiles, num_diagonal,
        num_masked, num_planes,
    ) = inputs  # fmt: skip
    if num_tiles > first_tile:
        mbarrier.expect(kv_ready, 2 * CONSUMERS * k_desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            row = k_start + first + consumer * ROWS
            tma.async_copy_global_to_shared(
                k_desc, [batch, kv_head, row, 0], kv_ready, k_tiles.index(consumer)
            )
            tma.async_copy_global_to_shared(
                v_desc, [batch, kv_head, row, 0], kv_ready, v_tiles.index(consumer)
            )
    slot = 0
    phase = 1
    for member in range(group_size):
        head = kv_head * group_size + member
        line = batch * num_heads + head
        for step in range(num_tiles - first_tile):
            tile = query_tile(step, first_tile, num_tiles, num_diagonal, num_masked)
            row = q_start + tile * BLOCK_Q
            mbarrier.wait(free.index(slot), phase)
            nbytes: gl.constexpr = q_desc.block_type.nbytes + stat_desc.block_type.nbytes
            ready = q_ready.index(slot)
            mbarrier.expect(ready, nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, row, 0], ready, q_tiles.index(slot)
            )
            column = line_start + tile * BLOCK_Q
            tma.async_copy_global_to_shared(stat_desc, [line, column], ready, lse_tiles.index(slot))
            ready = do_ready.index(slot)
            mbarrier.expect(ready, nbytes)
            tma.async_copy_global_to_shared(
                do_desc, [batch, head, row, 0], ready, do_tiles.index(slot)
            )
            tma.async_copy_global_to_shared(
                stat_desc, [num_planes + line, column], ready, delta_tiles.index(slot)
            )
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def add_queries(
    k_tile,
    v_tile,
    q_tiles,
    do_tiles,
    lse_tiles,
    delta_tiles,
    q_ready,
    do_ready,
    free,
    s,
    dk,
    dv,
    slot,
    phase,
    more,
    first_key,
    first_query,
    q_len,
    kv_len,
    scale_log2,
    STAGES: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    A_LAYOUT: gl.constexpr,
):
    """One query tile's share of dV and dK for 64 keys.

    It is given the tile's scores, S^T, and gives those of the next: the last two matmuls of a
    tile and the first of the next run back to back, while the other consumer computes.
    """
    dtype: gl.constexpr = k_tile.dtype
    zeros = gl.zeros([ROWS, BLOCK_Q], gl.float32, S_LAYOUT)
    mbarrier.wait(do_ready.index(slot), phase)
    dp = warpgroup_mma(
        v_tile, do_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    lse = lse_tiles.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
    delta = delta_tiles.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
    p = gl.exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        query = first_query + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, S_LAYOUT))
        visible = query[None, :] < q_len
        if CAUSAL:
            key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
            visible = visible & (key[:, None] <= query[None, :] + (kv_len - q_len))
        p = gl.where(visible, p, 0.0)
    a = gl.convert_layout(p.to(dtype), A_LAYOUT)
    dv = warpgroup_mma(a, do_tiles.index(slot), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = gl.convert_layout((p * (dp - delta[None, :])).to(dtype), A_LAYOUT)
    dk = warpgroup_mma(ds, q_tiles.index(slot), dk, is_async=True)
    next_slot = slot + 1
    if next_slot == STAGES:
        next_slot = 0
        phase ^= 1
    mbarrier.wait(q_ready.index(next_slot), phase, pred=more)
    # After the last tile these are scores of an old one, which nobody looks at.
    running = warpgroup_mma(
        k_tile, q_tiles.index(next_slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    dk, dv, a, ds = warpgroup_mma_wait(1, deps=[dk, dv, a, ds])
    mbarrier.arrive(free.index(slot))
    s = warpgroup_mma_wait(0, deps=[running])
    return s, dk, dv, next_slot, phase


@gluon.jit
def accumulate_dkdv(
    inputs,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """One consumer: dK and dV of 64 keys."""
    (
        k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles, kv_ready, q_ready, do_ready,
        free, dk_ptr, dv_ptr, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
        batch, kv_head, group_size, first, k_start, q_len, kv_len, first_tile, num_tiles,
        num_diagonal, num_masked, scale, scale_log2,
    ) = inputs  # fmt: skip
    dtype: gl.constexpr = k_tiles.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(k_tiles.type.layout.swizzle_byte_width, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_tile = k_tiles.index(CONSUMER)._reinterpret(dtype, [ROWS, BLOCK_D], TILE)
    v_tile = v_tiles.index(CONSUMER)._reinterpret(dtype, [ROWS, BLOCK_D], TILE)
    q_tiles = q_tiles._reinterpret(dtype, [STAGES, BLOCK_Q, BLOCK_D], TILE)
    do_tiles = do_tiles._reinterpret(dtype, [STAGES, BLOCK_Q, BLOCK_D], TILE)
    lse_tiles = lse_tiles._reinterpret(gl.float32, [STAGES, BLOCK_Q], LINE)
    delta_tiles = delta_tiles._reinterpret(gl.float32, [STAGES, BLOCK_Q], LINE)

    first_key = first + CONSUMER * ROWS
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, D_LAYOUT)
    slot = 0
    phase = 0
    steps = num_tiles - first_tile
    s = gl.zeros([ROWS, BLOCK_Q], gl.float32, S_LAYOUT)
    if steps > 0:
        mbarrier.wait(kv_ready, 0)
        mbarrier.wait(q_ready.index(0), 0)
        first_s = warpgroup_mma(
            k_tile, q_tiles.index(0).permute((1, 0)), s, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[first_s])
    for member in range(group_size):
        for step in range(num_masked):
            tile = query_tile(step, first_tile, num_tiles, num_diagonal, num_masked)
            s, dk, dv, slot, phase = add_queries(
                k_tile, v_tile, q_tiles, do_tiles, lse_tiles, delta_tiles, q_ready, do_ready,
                free, s, dk, dv, slot, phase, (step + 1 < steps) | (member + 1 < group_size),
                first_key, tile * BLOCK_Q, q_len, kv_len, scale_log2,
                STAGES, BLOCK_Q, CAUSAL, True, S_LAYOUT, A_LAYOUT,
            )  # fmt: skip
        for step in range(num_masked, steps):
            s, dk, dv, slot, phase = add_queries(
                k_tile, v_tile, q_tiles, do_tiles, lse_tiles, delta_tiles, q_ready, do_ready,
                free, s, dk, dv, slot, phase, (step + 1 < steps) | (member + 1 < group_size),
                first_key, 0, q_len, kv_len, scale_log2,
                STAGES, BLOCK_Q, CAUSAL, False, S_LAYOUT, A_LAYOUT,
            )  # fmt: skip
    store_rows(
        dk * scale, dk_ptr, stride_kb, stride_kh, stride_ks, batch, kv_head, first_key, k_start,
        kv_len, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    store_rows(
        dv, dv_ptr, stride_vb, stride_vh, stride_vs, batch, kv_head, first_key, k_start,
        kv_len, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@gluon.jit
def flash_backward_dkdv(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    stat_desc,
    dk_ptr,
    dv_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    num_heads,
    group_size,
    q_len,
    kv_len,
    num_planes,
    scale,
    scale_log2,
    BLOCK_Q: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dK and dV of one tile of keys of one key head, over the queries of all heads that use it."""
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS] + k_desc.block_type.shape, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS] + v_desc.block_type.shape, v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    lse_tiles = gl.allocate_shared_memory(
        gl.float32, [STAGES] + stat_desc.block_type.shape, stat_desc.layout
    )
    delta_tiles = gl.allocate_shared_memory(
        gl.float32, [STAGES] + stat_desc.block_type.shape, stat_desc.layout
    )
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(slot), count=1)
        mbarrier.init(do_ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=CONSUMERS)

    num_kv_heads = num_heads // group_size
    kv_head = gl.program_id(1) % num_kv_heads
    # The first keys are seen by the most queries: programs start in order, long ones first.
    first = gl.program_id(0) * (CONSUMERS * ROWS)
    batch, q_start, q_len, k_start, kv_len, line_start = sequence(
        cu_seqlens_q, cu_seqlens_k, gl.program_id(1) // num_kv_heads, q_len, kv_len, PACKED
    )
    num_tiles = gl.cdiv(q_len, BLOCK_Q)
    first_tile = 0
    first_unmasked = 0
    if CAUSAL:
        offset = kv_len - q_len
        first_tile = gl.minimum(gl.maximum(first - offset, 0) // BLOCK_Q, num_tiles)
        last_key = gl.minimum(first + CONSUMERS * ROWS, kv_len) - 1
        first_unmasked = gl.minimum(gl.cdiv(gl.maximum(last_key - offset, 0), BLOCK_Q), num_tiles)
    if first >= kv_len:
        first_tile = num_tiles
    num_diagonal = gl.maximum(first_unmasked - first_tile, 0)
    steps = num_tiles - first_tile
    ragged = gl.where((q_len % BLOCK_Q != 0) & (num_diagonal < steps), 1, 0)
    num_masked = num_diagonal + ragged

    producer = (
        q_desc, do_desc, k_desc, v_desc, stat_desc, k_tiles, v_tiles, q_tiles, do_tiles,
        lse_tiles, delta_tiles, kv_ready, q_ready, do_ready, free, batch, kv_head, num_heads,
        group_size, first, q_start, k_start, line_start, first_tile, num_tiles, num_diagonal,
        num_masked, num_planes,
    )  # fmt: skip
    inputs = (
        k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles, kv_ready, q_ready, do_ready,
        free, dk_ptr, dv_ptr, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
        batch, kv_head, group_size, first, k_start, q_len, kv_len, first_tile, num_tiles,
        num_diagonal, num_masked, scale, scale_log2,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (accumulate_dkdv, (inputs, 0, STAGES, BLOCK_Q, HEAD_DIM, BLOCK_D, CAUSAL)),
            (accumulate_dkdv, (inputs, 1, STAGES, BLOCK_Q, HEAD_DIM, BLOCK_D, CAUSAL)),
            (produce_queries, (producer, STAGES, BLOCK_Q)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, 24],
    )


@gluon.jit
def produce_keys(inputs, STAGES: gl.constexpr, BLOCK_K: gl.constexpr):
    """Q and dO once; then key and value tiles, the masked ones on the right first."""
    (
        q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_tiles, v_tiles, q_ready, k_ready,
        v_ready, free, batch, head, kv_head, first, q_start, k_start, num_key_tiles,
    ) = inputs  # fmt: skip
    if num_key_tiles > 0:
        mbarrier.expect(q_ready, 2 * CONSUMERS * q_desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            row = q_start + first + consumer * ROWS
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, row, 0], q_ready, q_tiles.index(consumer)
            )
            tma.async_copy_global_to_shared(
                do_desc, [batch, head, row, 0], q_ready, do_tiles.index(consumer)
            )
    slot = 0
    phase = 1
    for step in range(num_key_tiles):
        row = k_start + (num_key_tiles - 1 - step) * BLOCK_K
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_desc, [batch, kv_head, row, 0], k_ready.index(slot), k_tiles.index(slot)
        )
        mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v_desc, [batch, kv_head, row, 0], v_ready.index(slot), v_tiles.index(slot)
        )
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def add_keys(
    q_tile,
    do_tile,
    k_tiles,
    v_tiles,
    k_ready,
    v_ready,
    free,
    dq,
    ds,
    lse,
    delta,
    slot,
    phase,
    previous,
    more,
    started,
    tile,
    first_row,
    q_len,
    kv_len,
    scale_log2,
    STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    A_LAYOUT: gl.constexpr,
):
    """dS of the key tile at ``slot``, beside dQ of the one before.

    The first time there is none before: ``previous`` is the same tile, with dS zero.
    """
    zeros = gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT)
    s = warpgroup_mma(
        q_tile, k_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_ready.index(slot), phase)
    dp = warpgroup_mma(
        do_tile, v_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    dq = warpgroup_mma(ds, k_tiles.index(previous), dq, is_async=True)
    s = warpgroup_mma_wait(2, deps=[s])
    p = gl.exp2(s * scale_log2 - lse[:, None])
    if MASKED:
        seen = visible_keys(tile, first_row, q_len, kv_len, BLOCK_K, CAUSAL, S_LAYOUT)
        p = gl.where(seen, p, 0.0)
    dp = warpgroup_mma_wait(1, deps=[dp])
    new_ds = gl.convert_layout((p * (dp - delta[:, None])).to(ds.dtype), A_LAYOUT)
    next_slot = slot + 1
    if next_slot == STAGES:
        next_slot = 0
        phase ^= 1
    # Keeps the arithmetic above beside the matmuls: see hopper_forward.advance.
    mbarrier.wait(k_ready.index(next_slot), phase, pred=more)
    dq, ds, new_ds = warpgroup_mma_wait(0, deps=[dq, ds, new_ds])
    mbarrier.arrive(free.index(previous), pred=started)
    return dq, new_ds, next_slot, phase, slot


@gluon.jit
def accumulate_dq(
    inputs,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """One consumer: dQ of 64 queries."""
    (
        q_tiles, do_tiles, k_tiles, v_tiles, q_ready, k_ready, v_ready, free, statistics, plane,
        dq_ptr, stride_qb, stride_qh, stride_qs, batch, head, num_heads, padded_len, line_start,
        first, q_start, q_len, kv_len, num_key_tiles, num_unmasked, scale, scale_log2,
    ) = inputs  # fmt: skip
    dtype: gl.constexpr = q_tiles.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(q_tiles.type.layout.swizzle_byte_width, 16)
    q_tile = q_tiles.index(CONSUMER)._reinterpret(dtype, [ROWS, BLOCK_D], TILE)
    do_tile = do_tiles.index(CONSUMER)._reinterpret(dtype, [ROWS, BLOCK_D], TILE)
    k_tiles = k_tiles._reinterpret(dtype, [STAGES, BLOCK_K, BLOCK_D], TILE)
    v_tiles = v_tiles._reinterpret(dtype, [STAGES, BLOCK_K, BLOCK_D], TILE)

    first_row = first + CONSUMER * ROWS
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    line = statistics + (batch * num_heads + head).to(gl.int64) * padded_len + line_start
    lse = gl.load(line + row, mask=row < q_len, other=float("inf"))
    delta = gl.load(line + plane + row, mask=row < q_len, other=0.0)
    dq = gl.zeros([ROWS, BLOCK_D], gl.float32, D_LAYOUT)
    ds = gl.zeros([ROWS, BLOCK_K], dtype, A_LAYOUT)
    slot = 0
    phase = 0
    previous = 0
    if num_key_tiles > 0:
        mbarrier.wait(q_ready, 0)
        mbarrier.wait(k_ready.index(0), 0)
    num_masked = num_key_tiles - num_unmasked
    for step in range(num_masked):
        dq, ds, slot, phase, previous = add_keys(
            q_tile, do_tile, k_tiles, v_tiles, k_ready, v_ready, free, dq, ds, lse, delta, slot,
            phase, previous, step + 1 < num_key_tiles, step > 0,
            num_key_tiles - 1 - step, first_row, q_len, kv_len, scale_log2,
            STAGES, BLOCK_K, CAUSAL, True, S_LAYOUT, A_LAYOUT,
        )  # fmt: skip
    for step in range(num_masked, num_key_tiles):
        dq, ds, slot, phase, previous = add_keys(
            q_tile, do_tile, k_tiles, v_tiles, k_ready, v_ready, free, dq, ds, lse, delta, slot,
            phase, previous, step + 1 < num_key_tiles, step > 0,
            0, first_row, q_len, kv_len, scale_log2,
            STAGES, BLOCK_K, CAUSAL, False, S_LAYOUT, A_LAYOUT,
        )  # fmt: skip
    if num_key_tiles > 0:
        last_dq = warpgroup_mma(ds, k_tiles.index(previous), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[last_dq])
    store_rows(
        dq * scale, dq_ptr, stride_qb, stride_qh, stride_qs, batch, head, first_row, q_start,
        q_len, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@gluon.jit
def flash_backward_dq(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    statistics,
    dq_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    stride_qb,
    stride_qh,
    stride_qs,
    num_heads,
    group_size,
    q_len,
    kv_len,
    padded_len,
    plane,
    scale,
    scale_log2,
    BLOCK_K: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dQ of one tile of queries of one head, over the keys that they see."""
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    do_tiles = gl.allocate_shared_memory(
        dtype, [CONSUMERS] + do_desc.block_type.shape, do_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=CONSUMERS)

    head = gl.program_id(1) % num_heads
    batch, q_start, q_len, k_start, kv_len, line_start = sequence(
        cu_seqlens_q, cu_seqlens_k, gl.program_id(1) // num_heads, q_len, kv_len, PACKED
    )
    # The last queries see the most keys: programs start in order, long ones first.
    tile = gl.num_programs(0) - 1 - gl.program_id(0) if CAUSAL else gl.program_id(0)
    first = tile * (CONSUMERS * ROWS)
    num_key_tiles, num_unmasked = key_tiles(first, q_len, kv_len, CONSUMERS * ROWS, BLOCK_K, CAUSAL)

    producer = (
        q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_tiles, v_tiles, q_ready, k_ready,
        v_ready, free, batch, head, head // group_size, first, q_start, k_start, num_key_tiles,
    )  # fmt: skip
    inputs = (
        q_tiles, do_tiles, k_tiles, v_tiles, q_ready, k_ready, v_ready, free, statistics, plane,
        dq_ptr, stride_qb, stride_qh, stride_qs, batch, head, num_heads, padded_len, line_start,
        first, q_start, q_len, kv_len, num_key_tiles, num_unmasked, scale, scale_log2,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (accumulate_dq, (inputs, 0, STAGES, BLOCK_K, HEAD_DIM, BLOCK_D, CAUSAL)),
            (accumulate_dq, (inputs, 1, STAGES, BLOCK_K, HEAD_DIM, BLOCK_D, CAUSAL)),
            (produce_keys, (producer, STAGES, BLOCK_K)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, 24],
    )
