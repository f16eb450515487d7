"""FlashAttention backward for Hopper at head dims above 128, values as wide as keys, in Gluon.

The accumulators of dK and dV for 64 keys, 64 x 256 in float32 each, fill the registers of a
warpgroup by themselves. So the two consumers of :mod:`kernels.flash.hopper.backward`, each with
keys of its own, become two that share 64 keys and halve the columns; each computes one of the two
products over all columns, and they exchange the results through shared memory. A turn has 64
queries:

- The first consumer computes S^T = K Q^T and P^T = exp(S^T - lse), and leaves P^T in shared memory.
- The second computes dP^T = V dO^T and, from it and P^T, dS^T = P^T * (dP^T - delta), and leaves
  that there.
- Each has half of the columns of dV += P^T dO, of dK += dS^T Q, and, one turn later, of dQ = dS K.

Matmuls are under way while a consumer waits: dQ of the turn before while S becomes P, dV while dS
is computed, and behind dK the S or dP of the next turn. The order in which programs add to dQ is
that of :mod:`kernels.flash.hopper.backward_order`. P reaches dS rounded to 16 bits, as it reaches
dV.

Under a cap on the scores the second consumer needs P^T for dV, and for dS^T its product with the
slope of the cap: the first leaves that where dS^T is to be.

docs/kernels.md has the budget of shared memory and registers.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.flash.hopper.backward_order import (
    Gradients,
    Inputs,
    add_tile,
    bounds_of_loops,
    close_turns,
    open_turns,
    probabilities,
    program_of,
    programs_before,
    rows_of_gradients,
    slope_of_cap,
    start_scores,
    turn_of,
    turns_of_program,
)
from kernels.flash.hopper.backward_sharing import give, sharing_of
from kernels.flash.hopper.tiles import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    ROWS,
    Edges,
    columns,
    opaque,
)


class Shared(NamedTuple):
    """A program's shared memory: tiles, then barriers."""

    k_tile: Any
    v_tile: Any
    q_tiles: Any
    do_tiles: Any
    lse_tiles: Any
    delta_tiles: Any
    p_tiles: Any
    """P^T of this turn and the one before, like dS^T."""
    ds_tiles: Any
    kv_ready: Any
    q_ready: Any
    do_ready: Any
    free: Any
    p_ready: Any
    ds_ready: Any
    opened: Any
    """Consumers may add to dQ of the turn."""
    done: Any
    """Consumers have added to dQ of the turn; two, for turns in turn."""
    closed: Any
    """The next program has been told; two, for turns in turn."""


class Views(NamedTuple):
    """The tiles of :class:`Shared` as consumers see them: as matrices and lines."""

    k: Any
    """All keys, as one of one, so that an opaque index hides the addresses of its columns."""
    v: Any
    k_parts: Any
    """The keys 64 columns at a time."""
    q_tiles: Any
    do_tiles: Any
    lse_tiles: Any
    delta_tiles: Any
    p_tiles: Any
    ds_tiles: Any


class Turn(NamedTuple):
    """The queries of a turn, and the dQ of the turn before, which is added in this one."""

    dq_ptr: Any
    is_first: Any
    """Whether no other program adds to that dQ before this one."""
    has_dq: Any
    """Whether there was a turn before."""
    first_query: Any
    more: Any
    """Whether another turn follows."""


class Progress(NamedTuple):
    """Values that a consumer carries from one turn to the next."""

    dk: Any
    dv: Any
    product: Any
    """S^T of the next turn in the first consumer, dP^T - delta in the second."""
    slot: Any
    """Slot of the ring."""
    phase: Any
    parity: Any
    """Parity of the turn, counted through all heads of the program."""


@gluon.jit
def produce(inputs, shared, heads, seq, turns, STAGES: gl.constexpr):
    """Keys and values once; then per turn Q, dO and the two row statistics."""
    if turns.end > turns.first:
        place = [seq.batch, heads.kv_head, seq.k_start + turns.first_key, 0]
        mbarrier.expect(shared.kv_ready, 2 * inputs.k.block_type.nbytes)
        tma.async_copy_global_to_shared(inputs.k, place, shared.kv_ready, shared.k_tile)
        tma.async_copy_global_to_shared(inputs.v, place, shared.kv_ready, shared.v_tile)
    slot = 0
    # A ring starts free: waiting for the phase before the first one returns at once.
    phase = 1
    nbytes: gl.constexpr = inputs.q.block_type.nbytes + inputs.statistics.block_type.nbytes
    for member in range(heads.num_members):
        head = heads.first_head + member
        line = seq.batch * heads.num_heads + head
        for step in range(turns.first, turns.end):
            turn = turn_of(step)
            place = [seq.batch, head, seq.q_start + turn * ROWS, 0]
            column = seq.line_start + turn * ROWS
            mbarrier.wait(shared.free.index(slot), phase)
            ready = shared.q_ready.index(slot)
            mbarrier.expect(ready, nbytes)
            tma.async_copy_global_to_shared(inputs.q, place, ready, shared.q_tiles.index(slot))
            tma.async_copy_global_to_shared(
                inputs.statistics, [line, column], ready, shared.lse_tiles.index(slot)
            )
            ready = shared.do_ready.index(slot)
            mbarrier.expect(ready, nbytes)
            tma.async_copy_global_to_shared(inputs.do, place, ready, shared.do_tiles.index(slot))
            tma.async_copy_global_to_shared(
                inputs.statistics,
                [heads.num_lines + line, column],
                ready,
                shared.delta_tiles.index(slot),
            )
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def start_dq(views, parity, part):
    """64 by 64 of dQ = dS K, on its way; ``part`` is the first column in units of 64."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    return warpgroup_mma(
        views.ds_tiles.index(parity).permute((1, 0)),
        views.k_parts.index(part),
        gl.zeros([ROWS, ROWS], gl.float32, LAYOUT),
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def start_keys(views, slot, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """S^T = K Q^T of the queries of a slot, on its way."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    return start_scores(
        views.k.index(opaque(0)), views.q_tiles.index(opaque(slot)), zeros, False, MAIN, TAIL
    )


@gluon.jit
def start_values(views, slot, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """dP^T - delta, where dP^T = V dO^T, of the queries of a slot, on its way."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    slot = opaque(slot)
    # The product starts from minus delta, as in backward.half_turn.
    minus_delta = views.delta_tiles.index(slot).load(gl.SliceLayout(0, LAYOUT))
    dp, _ = gl.broadcast(minus_delta[None, :], gl.zeros([ROWS, ROWS], gl.float32, LAYOUT))
    return start_scores(views.v.index(opaque(0)), views.do_tiles.index(slot), dp, True, MAIN, TAIL)


@gluon.jit
def turn_of_scores(
    shared,
    views,
    before,
    now,
    seq,
    turns,
    scale_log2,
    STAGES: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
):
    """The first consumer's turn: P, the first 128 columns of dV and dK, and of dQ before."""
    dk, dv, product, slot, phase, parity = before
    dtype: gl.constexpr = views.q_tiles.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    COLUMNS: gl.constexpr = dk.shape[1]
    # Matmuls that S, or dP, takes.
    EACH: gl.constexpr = 2 if TAIL > 0 else 1
    slot = opaque(slot)
    new = opaque(parity)
    next_slot = slot + 1
    next_phase = phase
    if next_slot == STAGES:
        next_slot = 0
        next_phase = phase ^ 1
    lse = views.lse_tiles.index(slot).load(gl.SliceLayout(0, LAYOUT))
    # In a program's first turn there is no dS of a turn before: the result is not used.
    dq = start_dq(views, 1 - new, opaque(0))
    p = probabilities(
        product,
        lse,
        turns.first_key,
        now.first_query,
        turns,
        seq.kv_len,
        scale_log2,
        CAUSAL,
        MASK,
        SOFTCAP,
        MASKED,
    )
    if SOFTCAP > 0.0:
        # Both have computed dQ of the turn before the last from the dS that was there. The ring's
        # phases, of two slots, are those of every other turn.
        gl.static_assert(STAGES == 2)
        mbarrier.wait(shared.done.index(new), phase ^ 1)
        sloped = p * slope_of_cap(p, lse, SOFTCAP)
        views.ds_tiles.index(new).store(sloped.to(dtype))
    p = p.to(dtype)
    views.p_tiles.index(new).store(p)
    fence_async_shared()
    mbarrier.arrive(shared.p_ready)
    p = gl.convert_layout(p, A_LAYOUT)
    mbarrier.wait(shared.do_ready.index(slot), phase)
    dv = warpgroup_mma(p, columns(views.do_tiles.index(slot), 0, COLUMNS), dv, is_async=True)
    next_dq = start_dq(views, 1 - new, opaque(1))
    dq = warpgroup_mma_wait(2, deps=[dq])
    mbarrier.wait(shared.opened, parity ^ 1, pred=now.has_dq)
    if now.has_dq:
        add_tile(now.dq_ptr, dq, now.is_first)
    # Under a full mask the programs before have just added, and dK does not wait for them.
    if CAUSAL:
        next_dq = warpgroup_mma_wait(0, deps=[next_dq])
        if now.has_dq:
            add_tile(now.dq_ptr + ROWS * ROWS, next_dq, now.is_first)
            mbarrier.arrive(shared.done.index(parity ^ 1))
    mbarrier.wait(shared.q_ready.index(next_slot), next_phase, pred=now.more)
    mbarrier.wait(shared.ds_ready, parity)
    dk = warpgroup_mma(
        views.ds_tiles.index(new),
        columns(views.q_tiles.index(slot), 0, COLUMNS),
        dk,
        is_async=True,
    )
    if not CAUSAL:
        next_dq = warpgroup_mma_wait(1, deps=[next_dq])
        if now.has_dq:
            add_tile(now.dq_ptr + ROWS * ROWS, next_dq, now.is_first)
            mbarrier.arrive(shared.done.index(parity ^ 1))
    # Behind the last turn these are scores of an old one, which are not used.
    product = start_keys(views, next_slot, MAIN, TAIL)
    dk, dv, p = warpgroup_mma_wait(EACH, deps=[dk, dv, p])
    mbarrier.arrive(shared.free.index(slot))
    product = warpgroup_mma_wait(0, deps=[product])
    return Progress(dk, dv, product, next_slot, next_phase, parity ^ 1)


@gluon.jit
def turn_of_gradients(
    shared,
    views,
    before,
    now,
    STAGES: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """The second consumer's turn: dS, the other columns of dV and dK, and of dQ before."""
    dk, dv, product, slot, phase, parity = before
    dtype: gl.constexpr = views.q_tiles.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    COLUMNS: gl.constexpr = dk.shape[1]
    # Matmuls that S, or dP, takes.
    EACH: gl.constexpr = 2 if TAIL > 0 else 1
    slot = opaque(slot)
    new = opaque(parity)
    next_slot = slot + 1
    next_phase = phase
    if next_slot == STAGES:
        next_slot = 0
        next_phase = phase ^ 1
    dq = start_dq(views, 1 - new, opaque(2))
    mbarrier.wait(shared.p_ready, parity)
    if SOFTCAP > 0.0:
        # Each thread reads what it writes dS over.
        p = views.ds_tiles.index(new).load(LAYOUT)
    else:
        p = views.p_tiles.index(new).load(LAYOUT)
    dv = warpgroup_mma(
        views.p_tiles.index(new),
        columns(views.do_tiles.index(slot), 128, COLUMNS),
        dv,
        is_async=True,
    )
    ds = (p.to(gl.float32) * product).to(dtype)
    views.ds_tiles.index(new).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_ready)
    ds = gl.convert_layout(ds, A_LAYOUT)
    if COLUMNS == 128:
        next_dq = start_dq(views, 1 - new, opaque(3))
    mbarrier.wait(shared.q_ready.index(slot), phase)
    dk = warpgroup_mma(ds, columns(views.q_tiles.index(slot), 128, COLUMNS), dk, is_async=True)
    dq = warpgroup_mma_wait(3 if COLUMNS == 128 else 2, deps=[dq])
    mbarrier.wait(shared.opened, parity ^ 1, pred=now.has_dq)
    if now.has_dq:
        add_tile(now.dq_ptr + 2 * ROWS * ROWS, dq, now.is_first)
    if COLUMNS == 128:
        next_dq = warpgroup_mma_wait(1, deps=[next_dq])
        if now.has_dq:
            add_tile(now.dq_ptr + 3 * ROWS * ROWS, next_dq, now.is_first)
    if now.has_dq:
        mbarrier.arrive(shared.done.index(parity ^ 1))
    mbarrier.wait(shared.do_ready.index(next_slot), next_phase, pred=now.more)
    product = start_values(views, next_slot, MAIN, TAIL)
    dk, dv, ds = warpgroup_mma_wait(EACH, deps=[dk, dv, ds])
    mbarrier.arrive(shared.free.index(slot))
    product = warpgroup_mma_wait(0, deps=[product])
    return Progress(dk, dv, product, next_slot, next_phase, parity ^ 1)


@gluon.jit
def take_turns(
    shared,
    views,
    progress,
    dq_ptr,
    before,
    of_line,
    member,
    start,
    stop,
    seq,
    turns,
    heads,
    scale_log2,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_D: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
    ONTO: gl.constexpr,
):
    """The turns of one query head, in steps from ``start`` to ``stop``.

    Args:
        dq_ptr: dQ of the turn before.
        before: programs that add to it before this one.
        of_line: dQ of the head's first query.
        MASKED: of account for the first consumer only.
    """
    # Never, where there are sums already (kernels.flash.hopper.backward.take_turns).
    FIRST: gl.constexpr = -1 if ONTO else 0
    for step in range(start, stop):
        turn = turn_of(step)
        now = Turn(
            dq_ptr=dq_ptr,
            is_first=before == FIRST,
            has_dq=(member > 0) | (step > turns.first),
            first_query=turn * ROWS,
            more=(member + 1 < heads.num_members) | (step + 1 < turns.end),
        )
        if CONSUMER == 0:
            progress = turn_of_scores(
                shared, views, progress, now, seq, turns, scale_log2,
                STAGES, MAIN, TAIL, CAUSAL, MASK, SOFTCAP, MASKED,
            )  # fmt: skip
        else:
            progress = turn_of_gradients(shared, views, progress, now, STAGES, MAIN, TAIL, SOFTCAP)
        dq_ptr = of_line + turn * (ROWS * BLOCK_D)
        before = programs_before(turn, turns, ROWS, CAUSAL, MASK)
    return progress, dq_ptr, before


@gluon.jit
def accumulate(
    shared,
    dq_sums,
    gradients,
    seq,
    heads,
    turns,
    sharing,
    scale,
    scale_log2,
    CONSUMER: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ORDER: gl.constexpr,
    SHARED: gl.constexpr,
    ONTO: gl.constexpr,
):
    """One consumer: ``COLUMNS`` columns of dK and dV of 64 keys, and of every turn's dQ."""
    dtype: gl.constexpr = shared.q_tiles.dtype
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(shared.k_tile.type.layout.swizzle_byte_width, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    views = Views(
        k=shared.k_tile._reinterpret(dtype, [1, ROWS, BLOCK_D], TILE),
        v=shared.v_tile._reinterpret(dtype, [1, ROWS, BLOCK_D], TILE),
        # The same bytes: 64 columns of 16 bits, one swizzle's width, lie together.
        k_parts=shared.k_tile._reinterpret(dtype, [BLOCK_D // ROWS, ROWS, ROWS], TILE),
        q_tiles=shared.q_tiles._reinterpret(dtype, [STAGES, ROWS, BLOCK_D], TILE),
        do_tiles=shared.do_tiles._reinterpret(dtype, [STAGES, ROWS, BLOCK_D], TILE),
        lse_tiles=shared.lse_tiles._reinterpret(gl.float32, [STAGES, ROWS], LINE),
        delta_tiles=shared.delta_tiles._reinterpret(gl.float32, [STAGES, ROWS], LINE),
        p_tiles=shared.p_tiles,
        ds_tiles=shared.ds_tiles,
    )
    if turns.end > turns.first:
        mbarrier.wait(shared.kv_ready, 0)
    dk = gl.zeros([ROWS, COLUMNS], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, COLUMNS], gl.float32, D_LAYOUT)
    MASKED_LAST: gl.constexpr = ORDER == "heads" or ORDER == "keys"
    AGAIN: gl.constexpr = CONSUMER == 0 and (MASK == "window" or MASKED_LAST)
    DIVIDED: gl.constexpr = ORDER == "sections"
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    product = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    if turns.end > turns.first:
        if CONSUMER == 0:
            mbarrier.wait(shared.q_ready.index(0), 0)
            first = start_keys(views, 0, MAIN, TAIL)
        else:
            mbarrier.wait(shared.do_ready.index(0), 0)
            first = start_values(views, 0, MAIN, TAIL)
        product = warpgroup_mma_wait(0, deps=[first])
    progress = Progress(dk, dv, product, 0, 0, 0)
    dq_ptr = dq_sums
    before = 0
    for member in range(heads.num_members):
        line = heads.lines_before + seq.batch * heads.num_heads + heads.first_head + member
        of_line = dq_sums + (line.to(gl.int64) * heads.padded_len + seq.line_start) * BLOCK_D
        for again in range(2 if AGAIN else 1):
            start, middle, stop = bounds_of_loops(turns, again, AGAIN, MASK)
            if CONSUMER == 1:
                # It masks nothing.
                middle = turns.first
                stop = turns.end
            if CONSUMER == 0:
                progress, dq_ptr, before = take_turns(
                    shared, views, progress, dq_ptr, before, of_line, member, start, middle,
                    seq, turns, heads, scale_log2, CONSUMER, STAGES, BLOCK_D, MAIN, TAIL, CAUSAL,
                    MASK, SOFTCAP, True, ONTO,
                )  # fmt: skip
            progress, dq_ptr, before = take_turns(
                shared, views, progress, dq_ptr, before, of_line, member, middle, stop,
                seq, turns, heads, scale_log2, CONSUMER, STAGES, BLOCK_D, MAIN, TAIL, CAUSAL,
                MASK, SOFTCAP, False, ONTO,
            )  # fmt: skip
    parity = progress.parity
    if turns.end > turns.first:
        # dQ of the last turn.
        mbarrier.wait(shared.opened, parity ^ 1)
        for part in gl.static_range(COLUMNS // ROWS):
            running = start_dq(views, 1 - parity, 2 * CONSUMER + part)
            dq = warpgroup_mma_wait(0, deps=[running])
            is_first = before == (-1 if ONTO else 0)
            add_tile(dq_ptr + (2 * CONSUMER + part) * (ROWS * ROWS), dq, is_first)
        mbarrier.arrive(shared.done.index(parity ^ 1))
    dk_rows, dv_rows = rows_of_gradients(gradients, seq, heads)
    # The sums are one more part, behind those of the last turn.
    if SHARED:
        mbarrier.wait(shared.opened, parity, pred=sharing.adds | sharing.ends)
    FIRST_COLUMN: gl.constexpr = 128 * CONSUMER
    OF_DK: gl.constexpr = ROWS * FIRST_COLUMN
    OF_DV: gl.constexpr = OF_DK + ROWS * BLOCK_D
    first_key = turns.first_key
    dk = progress.dk * scale
    dv = progress.dv
    give(dk, dk_rows, first_key, sharing, OF_DK, FIRST_COLUMN, HEAD_DIM, SHARED, False, DIVIDED)
    give(dv, dv_rows, first_key, sharing, OF_DV, FIRST_COLUMN, HEAD_DIM, SHARED, False, DIVIDED)
    if SHARED:
        mbarrier.arrive(shared.done.index(parity), pred=sharing.adds)


# These differ from call to call, and their values do not change the loops, as that of kv_len does.
@gluon.jit(
    do_not_specialize=[
        "batch_size",
        "q_len",
        "num_lines",
        "order_count",
        "window",
        "prefix_len",
        "shift",
    ]
)
def flash_backward_wide(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    stat_desc,
    dq_sums,
    counts,
    key_sums,
    key_counts,
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
    batch_size,
    num_heads,
    group_size,
    num_members,
    heads_at_once,
    order_count,
    q_len,
    kv_len,
    num_lines,
    padded_len,
    padded_keys,
    window,
    prefix_len,
    shift,
    scale,
    scale_log2,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ORDER: gl.constexpr,
    SHARED: gl.constexpr,
    ONTO: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dK and dV of one tile of keys of one key head, and what these keys add to dQ.

    The parameters are those of :func:`kernels.flash.hopper.backward.flash_backward`.
    """
    dtype: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SQUARE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    shared = Shared(
        k_tile=gl.allocate_shared_memory(dtype, k_desc.block_type.shape, k_desc.layout),
        v_tile=gl.allocate_shared_memory(dtype, v_desc.block_type.shape, v_desc.layout),
        q_tiles=gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout),
        do_tiles=gl.allocate_shared_memory(
            dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout
        ),
        lse_tiles=gl.allocate_shared_memory(
            gl.float32, [STAGES] + stat_desc.block_type.shape, stat_desc.layout
        ),
        delta_tiles=gl.allocate_shared_memory(
            gl.float32, [STAGES] + stat_desc.block_type.shape, stat_desc.layout
        ),
        p_tiles=gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], SQUARE),
        ds_tiles=gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], SQUARE),
        kv_ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        q_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        do_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        p_ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        ds_ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        opened=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        done=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        closed=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    mbarrier.init(shared.kv_ready, count=1)
    mbarrier.init(shared.p_ready, count=1)
    mbarrier.init(shared.ds_ready, count=1)
    mbarrier.init(shared.opened, count=1)
    for turn in gl.static_range(2):
        mbarrier.init(shared.done.index(turn), count=CONSUMERS)
        mbarrier.init(shared.closed.index(turn), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(shared.q_ready.index(slot), count=1)
        mbarrier.init(shared.do_ready.index(slot), count=1)
        mbarrier.init(shared.free.index(slot), count=CONSUMERS)

    program = program_of(
        cu_seqlens_q, cu_seqlens_k, batch_size, num_heads, group_size, num_members, heads_at_once,
        order_count, q_len, kv_len, num_lines, padded_len, ROWS, ORDER, PACKED,
    )  # fmt: skip
    seq = program.seq
    heads = program.heads
    if PACKED and program.key_tile * ROWS >= seq.kv_len:
        return
    edges = Edges(window, prefix_len, shift)
    turns, num_parts = turns_of_program(program, edges, order_count, ROWS, CAUSAL, MASK, ORDER)
    sharing = 0
    if SHARED:
        sharing = sharing_of(
            key_sums,
            key_counts,
            padded_keys,
            heads,
            group_size,
            turns.first_key,
            seq,
            program.part,
            num_parts,
            2 * BLOCK_D,
            ORDER,
        )
    inputs = Inputs(q=q_desc, do=do_desc, k=k_desc, v=v_desc, statistics=stat_desc)
    gradients = Gradients(
        dk_ptr, dv_ptr, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs
    )
    # The first consumer has 128 columns, the second what MAIN + TAIL leave.
    REST: gl.constexpr = MAIN + TAIL - 128
    # Arguments stand twice, since a tuple with a name would no longer hold constants.
    gl.warp_specialize(
        [
            (accumulate, (shared, dq_sums, gradients, seq, heads, turns, sharing, scale,
                          scale_log2, 0, 128, STAGES, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL,
                          MASK, SOFTCAP, ORDER, SHARED, ONTO)),
            (accumulate, (shared, dq_sums, gradients, seq, heads, turns, sharing, scale,
                          scale_log2, 1, REST, STAGES, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL,
                          MASK, SOFTCAP, ORDER, SHARED, ONTO)),
            (produce, (inputs, shared, heads, seq, turns, STAGES)),
            (open_turns, (counts, shared, heads, seq, turns, sharing, ROWS, 1, CAUSAL, MASK,
                          SHARED)),
            (close_turns, (counts, shared, heads, seq, turns, sharing, ROWS, 1, CAUSAL, MASK,
                           SHARED)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, 24, 24, 24],
    )  # fmt: skip
