"""FlashAttention backward for Hopper (compute capability 9.0) in Gluon: one pass, no race.

It recomputes the probabilities from the log-sum-exp, P = exp(S - lse), and the gradient of the
scores, dS = P * (dP - delta) with dP = dO V^T and delta = rowsum(O * dO) (FlashAttention-2,
arXiv:2307.08691, algorithm 2), and uses each dS three times: five matmuls a tile, where separate
passes for dK, dV and for dQ need seven.

One program has 128 keys of one key head and loops over the queries that see them, of all query
heads of the group or a part of them, 128 at a time: a *turn* of two halves. Its warps have roles:

- A producer warp fills rings in shared memory through the tensor memory accelerator (TMA).
- Two consumer warpgroups have 64 of the keys each. They compute the transposes, S^T = K Q^T and
  dP^T = V dO^T, because then P^T and dS^T come out of the tensor core in the registers from
  which dV += P^T dO and dK += dS^T Q read them. dS goes to shared memory as well: in the turn
  after, each consumer computes half of dQ = dS K over all 128 keys.
- dQ is summed over programs in memory, in float32, and always in the same order, so that two
  runs agree bit for bit: the program of the last keys first. One warp waits for the programs
  before, another tells the one after. Under a causal mask that order costs nothing: the program
  of the keys before starts its loop one turn earlier, and so comes to each turn one turn later.

That order cannot block: programs start in the order of their indices, so whichever a program
waits for has started before it.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.flash.hopper.tiles import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PROGRAM_ROWS,
    ROWS,
    sequence,
    store_rows,
)


@gluon.jit
def produce(inputs, STAGES: gl.constexpr):
    """Keys and values once; then per half turn Q, dO and the two row statistics."""
    (
        q_desc, do_desc, k_desc, v_desc, stat_desc, k_tiles, v_tiles, q_tiles, do_tiles,
        lse_tiles, delta_tiles, kv_ready, q_ready, do_ready, free, batch, kv_head, num_heads,
        first_head, num_members, first, q_start, k_start, line_start, first_turn, num_turns,
        num_lines,
    ) = inputs  # fmt: skip
    if num_turns > first_turn:
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
    # A ring starts free: waiting for the phase before the first one returns at once.
    phase = 1
    nbytes: gl.constexpr = q_desc.block_type.nbytes + stat_desc.block_type.nbytes
    for member in range(num_members):
        head = first_head + member
        line = batch * num_heads + head
        for tile in range(2 * first_turn, 2 * num_turns):
            row = q_start + tile * ROWS
            column = line_start + tile * ROWS
            mbarrier.wait(free.index(slot), phase)
            ready = q_ready.index(slot)
            mbarrier.expect(ready, nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, row, 0], ready, q_tiles.index(slot)
            )
            tma.async_copy_global_to_shared(stat_desc, [line, column], ready, lse_tiles.index(slot))
            ready = do_ready.index(slot)
            mbarrier.expect(ready, nbytes)
            tma.async_copy_global_to_shared(
                do_desc, [batch, head, row, 0], ready, do_tiles.index(slot)
            )
            tma.async_copy_global_to_shared(
                stat_desc, [num_lines + line, column], ready, delta_tiles.index(slot)
            )
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def programs_before(turn, key_tile, num_key_tiles, offset, CAUSAL: gl.constexpr):
    """How many programs, of later keys, add to a turn's dQ before the one of ``key_tile``."""
    last = num_key_tiles - 1
    if CAUSAL:
        last = gl.minimum(last, (turn * PROGRAM_ROWS + PROGRAM_ROWS - 1 + offset) // PROGRAM_ROWS)
    return last - key_tile


@gluon.jit
def open_turns(inputs, CAUSAL: gl.constexpr):
    """The warp that lets the consumers add to dQ once all programs before have done so.

    A barrier tells only even phases from odd ones, so nobody may fall two phases behind another.
    Hence a turn opens when the consumers are done with the one before and the two turns before
    that are closed; ``done`` and ``closed`` are two barriers each, for turns in turn.
    """
    (
        counts, opened, done, closed, batch, num_heads, first_head, num_members, padded_len,
        line_start, first_turn, num_turns, key_tile, num_key_tiles, offset,
    ) = inputs  # fmt: skip
    step = 0
    for member in range(num_members):
        line = batch * num_heads + first_head + member
        of_line = counts + (line.to(gl.int64) * padded_len + line_start) // PROGRAM_ROWS
        for turn in range(first_turn, num_turns):
            before = programs_before(turn, key_tile, num_key_tiles, offset, CAUSAL)
            while gl.atomic_add(of_line + turn, 0, sem="acquire", scope="gpu") < before:
                pass
            # The phases of steps -1 and -2 count as over at the start.
            mbarrier.wait(done.index((step + 1) & 1), ((step + 3) >> 1) & 1)
            mbarrier.wait(closed.index(step & 1), ((step + 2) >> 1) & 1)
            mbarrier.arrive(opened)
            step += 1


@gluon.jit
def close_turns(inputs, CAUSAL: gl.constexpr):
    """The warp that lets the next program add once all of this one's additions are in memory.

    Apart from :func:`open_turns` because waiting for memory takes a third of a turn.
    """
    (
        counts, _, done, closed, batch, num_heads, first_head, num_members, padded_len,
        line_start, first_turn, num_turns, key_tile, num_key_tiles, offset,
    ) = inputs  # fmt: skip
    step = 0
    for member in range(num_members):
        line = batch * num_heads + first_head + member
        of_line = counts + (line.to(gl.int64) * padded_len + line_start) // PROGRAM_ROWS
        for turn in range(first_turn, num_turns):
            before = programs_before(turn, key_tile, num_key_tiles, offset, CAUSAL)
            mbarrier.wait(done.index(step & 1), (step >> 1) & 1)
            gl.atomic_xchg(of_line + turn, before + 1, sem="release", scope="gpu")
            mbarrier.arrive(closed.index(step & 1))
            step += 1


@gluon.jit
def by_thread(x):
    """[64, 64] in a wgmma accumulator's layout as [4096], what a thread holds in fours.

    Written in this order a warp's addition is 512 consecutive bytes; hopper_rows.finish_dq
    puts rows and columns in order again.
    """
    return x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * ROWS])


@gluon.jit
def add_to_dq(pointer, dq, is_first):
    """Add a tile [64, 64] of dQ in memory; the first program to come writes it."""
    x = by_thread(dq)
    LAYOUT: gl.constexpr = x.type.layout
    places = pointer + gl.arange(0, ROWS * ROWS, LAYOUT)
    if is_first:
        gl.store(places, x)
    else:
        gl.atomic_add(places, x, sem="relaxed", scope="gpu")


@gluon.jit
def probabilities(
    s,
    lse,
    first_key,
    first_query,
    offset,
    kv_len,
    scale_log2,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
):
    """P^T [64 keys, 64 queries]; queries beyond the sequence have lse = inf, and so P = 0."""
    p = gl.exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        LAYOUT: gl.constexpr = s.type.layout
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        last = gl.full([ROWS], kv_len - 1, gl.int32, gl.SliceLayout(0, LAYOUT))
        if CAUSAL:
            query = first_query + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
            last = gl.minimum(query + offset, last)
        p = gl.where(key[:, None] <= last[None, :], p, 0.0)
    return p


@gluon.jit
def opaque(x):
    """x, in the compiler's eyes a new value in every turn of a loop.

    Else it computes everything that depends on a constant tile index, some forty 64-bit
    addresses of wgmma operands, ahead of the loop, and has to keep them in memory.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def dq_tile(ds_tiles, k_parts, tile, column, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """64 by 64 of dQ = dS K, over both consumers' keys: two matmuls, on their way."""
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    dq = warpgroup_mma(
        ds_tiles.index(tile).permute((1, 0)),
        k_parts.index(column),
        zeros,
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        ds_tiles.index(tile + 1).permute((1, 0)), k_parts.index(PARTS + column), dq, is_async=True
    )


@gluon.jit
def half_turn(
    shared,
    kv,
    state,
    mine,
    is_first,
    started,
    more,
    first_key,
    first_query,
    offset,
    kv_len,
    scale_log2,
    HALF: gl.constexpr,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    RESIDENT: gl.constexpr,
    LAYOUT: gl.constexpr,
    A_LAYOUT: gl.constexpr,
):
    """64 queries: their share of this consumer's dV and dK, and dQ of the turn before.

    Where ``RESIDENT``, K and V stay in registers, which halves what matmuls read from shared
    memory, and scores are computed one half turn ahead, behind the matmuls before them.
    """
    (
        k_parts, q_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, q_ready, do_ready, free,
        ds_ready, opened, done,
    ) = shared  # fmt: skip
    dk, dv, s, lse, slot, phase, parity = state
    dtype: gl.constexpr = q_tiles.dtype
    LINE: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    PARTS: gl.constexpr = q_tiles.shape[2] // ROWS
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    me = opaque(CONSUMER)
    slot = opaque(slot)
    k, v = kv
    if not RESIDENT:
        k = k.index(me)
        v = v.index(me)
    # dS of this turn, tiles [half, consumer], and of the turn before.
    new_ds = 4 * opaque(parity)
    old_ds = 4 - new_ds

    if not RESIDENT:
        mbarrier.wait(q_ready.index(slot), phase)
        s = warpgroup_mma(
            k, q_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        lse = lse_tiles.index(slot).load(LINE)
    mbarrier.wait(do_ready.index(slot), phase)
    dp = warpgroup_mma(v, do_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    # Before the wait: reading shared memory is slow while matmuls do.
    delta = delta_tiles.index(slot).load(LINE)
    if not RESIDENT:
        s = warpgroup_mma_wait(1, deps=[s])
    p = probabilities(
        s, lse, first_key, first_query + HALF * ROWS, offset, kv_len, scale_log2, CAUSAL, MASKED
    )
    a = gl.convert_layout(p.to(dtype), A_LAYOUT)
    dv = warpgroup_mma(a, do_tiles.index(slot), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (p * (dp - delta[None, :])).to(dtype)
    if HALF == 0:
        # The other's dS of the turn before is there; and it is done with that of two before.
        mbarrier.wait(ds_ready, parity ^ 1, pred=started)
    ds_tiles.index(new_ds + 2 * HALF + CONSUMER).store(ds)
    ds = gl.convert_layout(ds, A_LAYOUT)
    # Of 64 columns a consumer takes the queries of one half; of 128, one half of the columns.
    if PARTS == 2:
        dq = dq_tile(ds_tiles, k_parts, old_ds + 2 * HALF, me, PARTS, LAYOUT)
    elif HALF == 0:
        dq = dq_tile(ds_tiles, k_parts, old_ds + 2 * CONSUMER, me - CONSUMER, PARTS, LAYOUT)
    dk = warpgroup_mma(ds, q_tiles.index(slot), dk, is_async=True)
    next_slot = slot + 1
    next_phase = phase
    if next_slot == STAGES:
        next_slot = 0
        next_phase ^= 1
    if RESIDENT:
        mbarrier.wait(q_ready.index(next_slot), next_phase, pred=more)
        # After the last tile these are scores of an old one, which nobody looks at.
        next_s = warpgroup_mma(
            k, q_tiles.index(next_slot).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        lse = lse_tiles.index(next_slot).load(LINE)
    if PARTS == 2 or HALF == 0:
        dq = warpgroup_mma_wait(2 if RESIDENT else 1, deps=[dq])
        if HALF == 0:
            mbarrier.wait(opened, parity ^ 1, pred=started)
        if started:
            add_to_dq(mine + HALF * (ROWS * ROWS * PARTS), dq, is_first)
            if HALF == PARTS - 1:
                # It was for the turn before, whose parity is the other one.
                mbarrier.arrive(done.index(parity ^ 1))
    if HALF == 1:
        fence_async_shared()
        mbarrier.arrive(ds_ready)
        parity ^= 1
    if RESIDENT:
        dk, dv, ds, a = warpgroup_mma_wait(1, deps=[dk, dv, ds, a])
        mbarrier.arrive(free.index(slot))
        s = warpgroup_mma_wait(0, deps=[next_s])
    else:
        dk, dv, ds, a = warpgroup_mma_wait(0, deps=[dk, dv, ds, a])
        mbarrier.arrive(free.index(slot))
    return dk, dv, s, lse, next_slot, next_phase, parity


@gluon.jit
def accumulate(
    inputs,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    """One consumer: dK and dV of 64 keys, and its half of every turn's dQ."""
    (
        k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, kv_ready, q_ready,
        do_ready, free, ds_ready, opened, done, dq_sums, dk_ptr, dv_ptr, stride_kb, stride_kh,
        stride_ks, stride_vb, stride_vh, stride_vs, batch, out_head, num_heads, first_head,
        num_members, first, k_start, kv_len, line_start, padded_len, first_turn, num_turns,
        num_masked, key_tile, num_key_tiles, offset, scale, scale_log2,
    ) = inputs  # fmt: skip
    dtype: gl.constexpr = k_tiles.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(k_tiles.type.layout.swizzle_byte_width, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = BLOCK_D // ROWS
    k = k_tiles._reinterpret(dtype, [CONSUMERS, ROWS, BLOCK_D], TILE)
    v = v_tiles._reinterpret(dtype, [CONSUMERS, ROWS, BLOCK_D], TILE)
    # The same bytes: 64 columns of 16 bits, one swizzle's width, lie together.
    k_parts = k_tiles._reinterpret(dtype, [CONSUMERS * PARTS, ROWS, ROWS], TILE)
    q_tiles = q_tiles._reinterpret(dtype, [STAGES, ROWS, BLOCK_D], TILE)
    do_tiles = do_tiles._reinterpret(dtype, [STAGES, ROWS, BLOCK_D], TILE)
    lse_tiles = lse_tiles._reinterpret(gl.float32, [STAGES, ROWS], LINE)
    delta_tiles = delta_tiles._reinterpret(gl.float32, [STAGES, ROWS], LINE)
    shared = (
        k_parts, q_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, q_ready, do_ready, free,
        ds_ready, opened, done,
    )  # fmt: skip

    first_key = first + CONSUMER * ROWS
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, D_LAYOUT)
    s = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    lse = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, LAYOUT))
    if num_turns > first_turn:
        mbarrier.wait(kv_ready, 0)
    if RESIDENT:
        k = k.index(CONSUMER).load(gl.DotOperandLayout(0, LAYOUT, 2))
        v = v.index(CONSUMER).load(gl.DotOperandLayout(0, LAYOUT, 2))
        if num_turns > first_turn:
            mbarrier.wait(q_ready.index(0), 0)
            first_s = warpgroup_mma(
                k, q_tiles.index(0).permute((1, 0)), s, use_acc=False, is_async=True
            )
            lse = lse_tiles.index(0).load(gl.SliceLayout(0, LAYOUT))
            s = warpgroup_mma_wait(0, deps=[first_s])
    state = (dk, dv, s, lse, 0, 0, 0)
    # Of dQ's tiles of 64 by 64, a turn's in order of rows, a consumer adds to every other one.
    mine = dq_sums
    before = 0
    for member in range(num_members):
        line = batch * num_heads + first_head + member
        of_line = dq_sums + (line.to(gl.int64) * padded_len + line_start) * BLOCK_D
        for turn in range(first_turn, first_turn + num_masked):
            for half in gl.static_range(2):
                state = half_turn(
                    shared, (k, v), state, mine, before == 0, (member > 0) | (turn > first_turn),
                    (half == 0) | (member + 1 < num_members) | (turn + 1 < num_turns),
                    first_key, turn * PROGRAM_ROWS, offset, kv_len, scale_log2,
                    half, CONSUMER, STAGES, CAUSAL, True, RESIDENT, LAYOUT, A_LAYOUT,
                )  # fmt: skip
            mine = of_line + turn * (PROGRAM_ROWS * BLOCK_D) + CONSUMER * (ROWS * ROWS)
            before = programs_before(turn, key_tile, num_key_tiles, offset, CAUSAL)
        for turn in range(first_turn + num_masked, num_turns):
            for half in gl.static_range(2):
                state = half_turn(
                    shared, (k, v), state, mine, before == 0, (member > 0) | (turn > first_turn),
                    (half == 0) | (member + 1 < num_members) | (turn + 1 < num_turns),
                    first_key, turn * PROGRAM_ROWS, offset, kv_len, scale_log2,
                    half, CONSUMER, STAGES, CAUSAL, False, RESIDENT, LAYOUT, A_LAYOUT,
                )  # fmt: skip
            mine = of_line + turn * (PROGRAM_ROWS * BLOCK_D) + CONSUMER * (ROWS * ROWS)
            before = programs_before(turn, key_tile, num_key_tiles, offset, CAUSAL)
    dk, dv, _, _, _, _, parity = state
    if num_turns > first_turn:
        # dQ of the last turn.
        mbarrier.wait(ds_ready, parity ^ 1)
        mbarrier.wait(opened, parity ^ 1)
        for part in gl.static_range(PARTS):
            tile = 4 - 4 * parity + 2 * (CONSUMER if PARTS == 1 else part)
            running = dq_tile(ds_tiles, k_parts, tile, 0 if PARTS == 1 else CONSUMER, PARTS, LAYOUT)
            dq = warpgroup_mma_wait(0, deps=[running])
            add_to_dq(mine + part * (ROWS * ROWS * PARTS), dq, before == 0)
        mbarrier.arrive(done.index(parity ^ 1))
    store_rows(
        dk * scale, dk_ptr, stride_kb, stride_kh, stride_ks, batch, out_head, first_key, k_start,
        kv_len, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    store_rows(
        dv, dv_ptr, stride_vb, stride_vh, stride_vs, batch, out_head, first_key, k_start,
        kv_len, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@gluon.jit
def place_in_order(heads_at_once, num_key_tiles):
    """Which head and which key tile is this program's.

    Programs start in order, and of one head the last keys have to be added to dQ first. So many
    heads take turns, which leaves the long programs of all of them, not of the last head alone,
    for the end; and where all programs are as long, they meet at a turn's dQ later.
    """
    index = gl.program_id(0)
    num_heads = gl.num_programs(0) // num_key_tiles
    first_head = index // (heads_at_once * num_key_tiles) * heads_at_once
    width = gl.minimum(heads_at_once, num_heads - first_head)
    index -= first_head * num_key_tiles
    return first_head + index % width, num_key_tiles - 1 - index // width


@gluon.jit
def flash_backward(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    stat_desc,
    dq_sums,
    counts,
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
    num_members,
    heads_at_once,
    q_len,
    kv_len,
    num_lines,
    padded_len,
    scale,
    scale_log2,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dK and dV of one tile of keys of one key head, and what these keys add to dQ.

    It takes ``num_members`` of the ``group_size`` query heads that share the key head; where that
    is not all of them, the parts write a dK and dV each, as if of so many more key heads, and
    hopper_rows.sum_parts adds them up.
    dq_sums is [num_lines, padded_len, BLOCK_D] float32, tiles of 64 by 64 in the order of
    :func:`by_thread`; counts is [num_lines, padded_len / 128] int32, zero at the start.
    """
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
    # dS^T of this turn and the one before: two halves, two consumers.
    ds_tiles = gl.allocate_shared_memory(dtype, [8, ROWS, ROWS], gl.NVMMASharedLayout(128, 16))
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    opened = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    closed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    mbarrier.init(ds_ready, count=CONSUMERS)
    mbarrier.init(opened, count=1)
    for turn in gl.static_range(2):
        mbarrier.init(done.index(turn), count=CONSUMERS)
        mbarrier.init(closed.index(turn), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(slot), count=1)
        mbarrier.init(do_ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=CONSUMERS)

    part, key_tile = place_in_order(heads_at_once, gl.cdiv(kv_len, PROGRAM_ROWS))
    num_out_heads = num_heads // num_members
    out_head = part % num_out_heads
    first_head = out_head * num_members
    kv_head = first_head // group_size
    batch, q_start, q_len, k_start, kv_len, line_start = sequence(
        cu_seqlens_q, cu_seqlens_k, part // num_out_heads, q_len, kv_len, PACKED
    )
    first = key_tile * PROGRAM_ROWS
    num_key_tiles = gl.cdiv(kv_len, PROGRAM_ROWS)
    num_turns = gl.cdiv(q_len, PROGRAM_ROWS)
    offset = kv_len - q_len
    first_turn = 0
    num_masked = 0
    if CAUSAL:
        first_turn = gl.minimum(gl.maximum(first - offset, 0) // PROGRAM_ROWS, num_turns)
        last_key = first + PROGRAM_ROWS - 1
        first_unmasked = gl.cdiv(gl.maximum(last_key - offset, 0), PROGRAM_ROWS)
        num_masked = gl.maximum(gl.minimum(first_unmasked, num_turns) - first_turn, 0)
    if first + PROGRAM_ROWS > kv_len:
        num_masked = num_turns - first_turn
    if first >= kv_len:
        first_turn = num_turns
        num_masked = 0

    producer = (
        q_desc, do_desc, k_desc, v_desc, stat_desc, k_tiles, v_tiles, q_tiles, do_tiles,
        lse_tiles, delta_tiles, kv_ready, q_ready, do_ready, free, batch, kv_head, num_heads,
        first_head, num_members, first, q_start, k_start, line_start, first_turn, num_turns,
        num_lines,
    )  # fmt: skip
    turns = (
        counts, opened, done, closed, batch, num_heads, first_head, num_members, padded_len,
        line_start, first_turn, num_turns, key_tile, num_key_tiles, offset,
    )  # fmt: skip
    inputs = (
        k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, kv_ready, q_ready,
        do_ready, free, ds_ready, opened, done, dq_sums, dk_ptr, dv_ptr, stride_kb, stride_kh,
        stride_ks, stride_vb, stride_vh, stride_vs, batch, out_head, num_heads, first_head,
        num_members, first, k_start, kv_len, line_start, padded_len, first_turn, num_turns,
        num_masked, key_tile, num_key_tiles, offset, scale, scale_log2,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (accumulate, (inputs, 0, STAGES, HEAD_DIM, BLOCK_D, CAUSAL, RESIDENT)),
            (accumulate, (inputs, 1, STAGES, HEAD_DIM, BLOCK_D, CAUSAL, RESIDENT)),
            (produce, (producer, STAGES)),
            (open_turns, (turns, CAUSAL)),
            (close_turns, (turns, CAUSAL)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, 24, 24, 24],
    )
