"""FlashAttention backward for Hopper where values are narrower than keys, in Gluon.

Latent attention trains with 192 columns of queries and keys and 128 of values. dK and dV of 64 keys
then take 160 of a thread's registers, and beside the operand of a matmul there is room for one
product of 64 by 64. So this is :mod:`kernels.flash.hopper.backward`, with 128 keys a program, 64 of
them a consumer's, and turns of two halves of 64 queries, but for:

- S^T of the next half turn begins behind dK of this one, once dQ of the one before was added.
- S^T becomes P^T in 16 bits before dP^T begins, and waits in shared memory, where dS^T comes to be:
  P reaches dS as it reaches dV.
- dQ is computed and added in the half turn after its own: of three parts of 64 columns each
  consumer has one, and in one half of a turn the third one, too.
- Queries and keys lie in panels of 64 columns, two of which are one tile, as Triton's tiles have
  powers of two.
- Halves of a turn run the same code.

docs/kernels.md has the budget of shared memory and registers, and what else was tried.
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
    tile_of,
    turn_of,
    turns_of_program,
)
from kernels.flash.hopper.backward_sharing import give, sharing_of
from kernels.flash.hopper.tiles import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PROGRAM_ROWS,
    ROWS,
    Edges,
    opaque,
)

PANELS: gl.constexpr = gl.constexpr(3)
"""Tiles of 64 columns that queries and keys lie in."""


class Shared(NamedTuple):
    """A program's shared memory: tiles, then barriers."""

    k_panels: Any
    """Two for each consumer, then one for each."""
    v_tiles: Any
    q_panels: Any
    """Two for each slot of the ring of queries, then one for each."""
    do_tiles: Any
    """Of the two halves of a turn."""
    lse_tiles: Any
    delta_tiles: Any
    ds_tiles: Any
    """dS^T of this half turn and the one before: two halves, two consumers."""
    kv_ready: Any
    q_ready: Any
    q_free: Any
    do_ready: Any
    do_free: Any
    ds_ready: Any
    opened: Any
    """Consumers may add to dQ of the half turn (backward_order.open_turns)."""
    done: Any
    """Consumers have added to dQ of the half turn; two, for halves."""
    closed: Any
    """The next program has been told; two, for halves."""


class Views(NamedTuple):
    """The tiles of :class:`Shared` as consumers see them: as matrices and lines."""

    k_pairs: Any
    """Two panels as one tile: a consumer's first 128 columns."""
    k_panels: Any
    v_tiles: Any
    q_pairs: Any
    q_panels: Any
    do_tiles: Any
    lse_tiles: Any
    delta_tiles: Any
    ds_tiles: Any


class HalfTurn(NamedTuple):
    """The queries of a half turn, and the dQ of the one before, which is added in this one."""

    dq_ptr: Any
    """Address of that dQ."""
    is_first: Any
    """Whether no other program adds to it before this one."""
    has_dq: Any
    """Whether there was a half turn before."""
    first_key: Any
    """The consumer's first key."""
    first_query: Any
    more: Any
    """Whether another half turn follows."""


class Progress(NamedTuple):
    """Values that a consumer carries from one half turn to the next."""

    dk: Any
    dk_tail: Any
    """Columns of dk behind the first 128."""
    dv: Any
    s: Any
    """Scores of the next half turn."""
    slot: Any
    """Slot of the ring of queries."""
    phase: Any
    parity: Any
    """Parity of the turn, counted through all heads of the program."""


@gluon.jit
def copy_panels(desc, place, ready, panels, number, COUNT: gl.constexpr):
    """All panels of 64 rows, from ``place`` on, of consumer or slot ``number`` of ``COUNT``."""
    batch, head, row = place
    for panel in gl.static_range(PANELS):
        # Pairs first, since a pair's address is a multiple of its size.
        index = 2 * number + panel if panel < 2 else 2 * COUNT + number
        tma.async_copy_global_to_shared(
            desc, [batch, head, row, panel * ROWS], ready, panels.index(index)
        )


@gluon.jit
def produce(inputs, shared, heads, seq, turns, STAGES: gl.constexpr):
    """Keys and values once; then per half turn Q, dO and the two row statistics.

    dO has a ring of its own, of two slots: it is read for a third of the time.
    """
    if turns.end > turns.first:
        OF_KEYS: gl.constexpr = PANELS * inputs.k.block_type.nbytes + inputs.v.block_type.nbytes
        mbarrier.expect(shared.kv_ready, CONSUMERS * OF_KEYS)
        for consumer in gl.static_range(CONSUMERS):
            row = seq.k_start + turns.first_key + consumer * ROWS
            place = (seq.batch, heads.kv_head, row)
            copy_panels(inputs.k, place, shared.kv_ready, shared.k_panels, consumer, CONSUMERS)
            tma.async_copy_global_to_shared(
                inputs.v,
                [seq.batch, heads.kv_head, row, 0],
                shared.kv_ready,
                shared.v_tiles.index(consumer),
            )
    slot = 0
    # Rings start free: waiting for the phase before the first one returns at once.
    phase = 1
    parity = 1
    OF_LINE: gl.constexpr = inputs.statistics.block_type.nbytes
    for member in range(heads.num_members):
        head = heads.first_head + member
        line = seq.batch * heads.num_heads + head
        for half_step in range(2 * turns.first, 2 * turns.end):
            _, tile = tile_of(half_step, PROGRAM_ROWS, 2)
            half = half_step & 1
            row = seq.q_start + tile * ROWS
            column = seq.line_start + tile * ROWS
            mbarrier.wait(shared.q_free.index(slot), phase)
            ready = shared.q_ready.index(slot)
            mbarrier.expect(ready, PANELS * inputs.q.block_type.nbytes + OF_LINE)
            copy_panels(inputs.q, (seq.batch, head, row), ready, shared.q_panels, slot, STAGES)
            tma.async_copy_global_to_shared(
                inputs.statistics, [line, column], ready, shared.lse_tiles.index(slot)
            )
            mbarrier.wait(shared.do_free.index(half), parity)
            ready = shared.do_ready.index(half)
            mbarrier.expect(ready, inputs.do.block_type.nbytes + OF_LINE)
            tma.async_copy_global_to_shared(
                inputs.do, [seq.batch, head, row, 0], ready, shared.do_tiles.index(half)
            )
            tma.async_copy_global_to_shared(
                inputs.statistics,
                [heads.num_lines + line, column],
                ready,
                shared.delta_tiles.index(half),
            )
            parity ^= half
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def dq_tile(views, tile, panel, STEP: gl.constexpr):
    """64 by 64 of dQ = dS K, over both consumers' keys: two matmuls, on their way.

    Args:
        tile: the first of two of dS.
        panel: of the first consumer's keys.
        STEP: from there to the second consumer's.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    dq = warpgroup_mma(
        views.ds_tiles.index(tile).permute((1, 0)),
        views.k_panels.index(panel),
        gl.zeros([ROWS, ROWS], gl.float32, LAYOUT),
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        views.ds_tiles.index(tile + 1).permute((1, 0)),
        views.k_panels.index(panel + STEP),
        dq,
        is_async=True,
    )


@gluon.jit
def start_scores(views, me, slot, STAGES: gl.constexpr):
    """S^T = K Q^T of the keys of consumer ``me`` and the queries of a slot: two, on their way."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    s = warpgroup_mma(
        views.k_pairs.index(me),
        views.q_pairs.index(slot).permute((1, 0)),
        gl.zeros([ROWS, ROWS], gl.float32, LAYOUT),
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        views.k_panels.index(2 * CONSUMERS + me),
        views.q_panels.index(2 * STAGES + slot).permute((1, 0)),
        s,
        is_async=True,
    )


@gluon.jit
def half_turn(
    shared,
    views,
    before,
    now,
    seq,
    turns,
    scale_log2,
    half,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
):
    """64 queries: their share of this consumer's dV and dK, and dQ of the half turn before."""
    dk, dk_tail, dv, s, slot, phase, parity = before
    dtype: gl.constexpr = views.do_tiles.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    LINE: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    me = opaque(CONSUMER)
    slot = opaque(slot)
    # The half turn before is the other half, of this turn or of the one before.
    last = 1 - half
    # Tiles [half, consumer].
    new_ds = 2 * half
    old_ds = 2 - new_ds
    lse = views.lse_tiles.index(slot).load(LINE)
    p = probabilities(
        s,
        lse,
        now.first_key,
        now.first_query,
        turns,
        seq.kv_len,
        scale_log2,
        CAUSAL,
        MASK,
        SOFTCAP,
        MASKED,
    )
    factor = p
    if SOFTCAP > 0.0:
        factor = p * slope_of_cap(p, lse, SOFTCAP)
    a = gl.convert_layout(p.to(dtype), A_LAYOUT)
    # The other consumer has written dS of the half turn before, and read that of two before.
    mbarrier.wait(shared.ds_ready, last, pred=now.has_dq)
    views.ds_tiles.index(new_ds + CONSUMER).store(factor.to(dtype))
    mbarrier.wait(shared.do_ready.index(half), parity)
    do_tile = views.do_tiles.index(half)
    # The product starts from minus delta, as in backward.half_turn.
    dp, _ = gl.broadcast(views.delta_tiles.index(half).load(LINE)[None, :], zeros)
    # Together: one after the other, with P in registers, all took 1.10 of the time.
    dv = warpgroup_mma(a, do_tile, dv, is_async=True)
    dp = warpgroup_mma(views.v_tiles.index(me), do_tile.permute((1, 0)), dp, is_async=True)
    dp, dv, a = warpgroup_mma_wait(0, deps=[dp, dv, a])
    mbarrier.arrive(shared.do_free.index(half))
    factor = views.ds_tiles.index(new_ds + CONSUMER).load(LAYOUT)
    ds = (factor.to(gl.float32) * dp).to(dtype)
    views.ds_tiles.index(new_ds + CONSUMER).store(ds)
    ds = gl.convert_layout(ds, A_LAYOUT)
    next_slot = slot + 1
    if next_slot == STAGES:
        next_slot = 0
        phase ^= 1
    # A warp that looks at a barrier waits for its matmuls (backward.half_turn).
    mbarrier.wait(shared.opened, last, pred=now.has_dq)
    mbarrier.wait(shared.q_ready.index(next_slot), phase, pred=now.more)
    dq = dq_tile(views, old_ds, me, 2)
    dk = warpgroup_mma(ds, views.q_pairs.index(slot), dk, is_async=True)
    dk_tail = warpgroup_mma(ds, views.q_panels.index(2 * STAGES + slot), dk_tail, is_async=True)
    dq = warpgroup_mma_wait(2, deps=[dq])
    if now.has_dq:
        add_tile(now.dq_ptr + CONSUMER * (ROWS * ROWS), dq, now.is_first)
    if half == CONSUMER:
        third = dq_tile(views, old_ds, me - CONSUMER + 2 * CONSUMERS, 1)
        third = warpgroup_mma_wait(0, deps=[third])
        if now.has_dq:
            add_tile(now.dq_ptr + 2 * (ROWS * ROWS), third, now.is_first)
    # Behind the last half turn these are scores of an old one, which are not used.
    next_s = start_scores(views, me, opaque(next_slot), STAGES)
    dk, dk_tail, ds = warpgroup_mma_wait(2, deps=[dk, dk_tail, ds])
    mbarrier.arrive(shared.q_free.index(slot))
    if now.has_dq:
        mbarrier.arrive(shared.done.index(last))
    fence_async_shared()
    mbarrier.arrive(shared.ds_ready)
    s = warpgroup_mma_wait(0, deps=[next_s])
    return Progress(dk, dk_tail, dv, s, next_slot, phase, parity ^ half)


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
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
    ONTO: gl.constexpr,
):
    """The turns of one query head, in steps from ``start`` to ``stop``.

    Args:
        dq_ptr: dQ of the half turn before.
        before: programs that add to it before this one.
        of_line: dQ of the head's first query.
    """
    # Never, where there are sums already (kernels.flash.hopper.backward.take_turns).
    FIRST: gl.constexpr = -1 if ONTO else 0
    for place in range(2 * start, 2 * stop):
        step = place >> 1
        half = place & 1
        turn = turn_of(step)
        now = HalfTurn(
            dq_ptr=dq_ptr,
            is_first=before == FIRST,
            has_dq=(half == 1) | (member > 0) | (step > turns.first),
            first_key=turns.first_key + CONSUMER * ROWS,
            first_query=turn * PROGRAM_ROWS + half * ROWS,
            more=(half == 0) | (member + 1 < heads.num_members) | (step + 1 < turns.end),
        )
        progress = half_turn(
            shared, views, progress, now, seq, turns, scale_log2,
            half, CONSUMER, STAGES, CAUSAL, MASK, SOFTCAP, MASKED,
        )  # fmt: skip
        dq_ptr = of_line + (turn * PROGRAM_ROWS + half * ROWS) * BLOCK_D
        before = programs_before(turn, turns, PROGRAM_ROWS, CAUSAL, MASK)
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
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_V: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ORDER: gl.constexpr,
    SHARED: gl.constexpr,
    ONTO: gl.constexpr,
):
    """One consumer: dK and dV of 64 keys, and its half of every turn's dQ."""
    dtype: gl.constexpr = shared.v_tiles.dtype
    PAIR: gl.constexpr = 2 * ROWS
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIR, 16])
    TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(shared.v_tiles.type.layout.swizzle_byte_width, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    views = Views(
        k_pairs=shared.k_panels._reinterpret(dtype, [CONSUMERS, ROWS, PAIR], TILE),
        k_panels=shared.k_panels._reinterpret(dtype, [PANELS * CONSUMERS, ROWS, ROWS], TILE),
        v_tiles=shared.v_tiles._reinterpret(dtype, [CONSUMERS, ROWS, BLOCK_V], TILE),
        q_pairs=shared.q_panels._reinterpret(dtype, [STAGES, ROWS, PAIR], TILE),
        q_panels=shared.q_panels._reinterpret(dtype, [PANELS * STAGES, ROWS, ROWS], TILE),
        do_tiles=shared.do_tiles._reinterpret(dtype, [2, ROWS, BLOCK_V], TILE),
        lse_tiles=shared.lse_tiles._reinterpret(gl.float32, [STAGES, ROWS], LINE),
        delta_tiles=shared.delta_tiles._reinterpret(gl.float32, [2, ROWS], LINE),
        ds_tiles=shared.ds_tiles,
    )
    if turns.end > turns.first:
        mbarrier.wait(shared.kv_ready, 0)
    first_key = turns.first_key + CONSUMER * ROWS
    dk = gl.zeros([ROWS, PAIR], gl.float32, D_LAYOUT)
    dk_tail = gl.zeros([ROWS, ROWS], gl.float32, TAIL_LAYOUT)
    dv = gl.zeros([ROWS, BLOCK_V], gl.float32, D_LAYOUT)
    MASKED_LAST: gl.constexpr = ORDER == "heads" or ORDER == "keys"
    AGAIN: gl.constexpr = MASK == "window" or MASKED_LAST
    DIVIDED: gl.constexpr = ORDER == "sections"
    s = gl.zeros([ROWS, ROWS], gl.float32, TAIL_LAYOUT)
    if turns.end > turns.first:
        mbarrier.wait(shared.q_ready.index(0), 0)
        first_s = start_scores(views, CONSUMER, 0, STAGES)
        s = warpgroup_mma_wait(0, deps=[first_s])
    progress = Progress(dk, dk_tail, dv, s, 0, 0, 0)
    dq_ptr = dq_sums
    before = 0
    for member in range(heads.num_members):
        line = heads.lines_before + seq.batch * heads.num_heads + heads.first_head + member
        of_line = dq_sums + (line.to(gl.int64) * heads.padded_len + seq.line_start) * BLOCK_D
        for again in range(2 if AGAIN else 1):
            start, middle, stop = bounds_of_loops(turns, again, AGAIN, MASK)
            progress, dq_ptr, before = take_turns(
                shared, views, progress, dq_ptr, before, of_line, member, start, middle, seq, turns,
                heads, scale_log2, CONSUMER, STAGES, BLOCK_D, CAUSAL, MASK, SOFTCAP, True, ONTO,
            )  # fmt: skip
            progress, dq_ptr, before = take_turns(
                shared, views, progress, dq_ptr, before, of_line, member, middle, stop, seq, turns,
                heads, scale_log2, CONSUMER, STAGES, BLOCK_D, CAUSAL, MASK, SOFTCAP, False, ONTO,
            )  # fmt: skip
    if turns.end > turns.first:
        # dQ of the last half turn.
        mbarrier.wait(shared.ds_ready, 1)
        mbarrier.wait(shared.opened, 1)
        is_first = before == (-1 if ONTO else 0)
        dq = dq_tile(views, 2, CONSUMER, 2)
        dq = warpgroup_mma_wait(0, deps=[dq])
        add_tile(dq_ptr + CONSUMER * (ROWS * ROWS), dq, is_first)
        if CONSUMER == 0:
            third = dq_tile(views, 2, 2 * CONSUMERS, 1)
            third = warpgroup_mma_wait(0, deps=[third])
            add_tile(dq_ptr + 2 * (ROWS * ROWS), third, is_first)
        mbarrier.arrive(shared.done.index(1))
    dk_rows, dv_rows = rows_of_gradients(gradients, seq, heads)
    # The sums are one more part, behind those of the last turn.
    if SHARED:
        mbarrier.wait(shared.opened, 0, pred=sharing.adds | sharing.ends)
    OF_DK: gl.constexpr = CONSUMER * ROWS * (BLOCK_D + BLOCK_V)
    OF_TAIL: gl.constexpr = OF_DK + ROWS * PAIR
    OF_DV: gl.constexpr = OF_DK + ROWS * BLOCK_D
    dk = progress.dk * scale
    give(dk, dk_rows, first_key, sharing, OF_DK, 0, HEAD_DIM, SHARED, False, DIVIDED)
    dk = progress.dk_tail * scale
    give(dk, dk_rows, first_key, sharing, OF_TAIL, PAIR, HEAD_DIM, SHARED, False, DIVIDED)
    dv = progress.dv
    give(dv, dv_rows, first_key, sharing, OF_DV, 0, VALUE_DIM, SHARED, False, DIVIDED)
    if SHARED:
        mbarrier.arrive(shared.done.index(0), pred=sharing.adds)


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
def flash_backward_narrow(
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
    VALUE_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_V: gl.constexpr,
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

    The parameters are those of :func:`kernels.flash.hopper.backward.flash_backward`, but queries
    and keys come in panels of 64 columns; ``BLOCK_D``, 256, is of dq_sums and key_sums; values have
    ``VALUE_DIM`` columns of ``BLOCK_V``, 128; and there are no bands.
    """
    gl.static_assert(BLOCK_D == 4 * ROWS and BLOCK_V == 2 * ROWS)
    gl.static_assert(ORDER != "bands" and ORDER != "halves")
    dtype: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        k_panels=gl.allocate_shared_memory(
            dtype, [PANELS * CONSUMERS] + k_desc.block_type.shape, k_desc.layout
        ),
        v_tiles=gl.allocate_shared_memory(
            dtype, [CONSUMERS] + v_desc.block_type.shape, v_desc.layout
        ),
        q_panels=gl.allocate_shared_memory(
            dtype, [PANELS * STAGES] + q_desc.block_type.shape, q_desc.layout
        ),
        do_tiles=gl.allocate_shared_memory(dtype, [2] + do_desc.block_type.shape, do_desc.layout),
        lse_tiles=gl.allocate_shared_memory(
            gl.float32, [STAGES] + stat_desc.block_type.shape, stat_desc.layout
        ),
        delta_tiles=gl.allocate_shared_memory(
            gl.float32, [2] + stat_desc.block_type.shape, stat_desc.layout
        ),
        ds_tiles=gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], gl.NVMMASharedLayout(128, 16)),
        kv_ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        q_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        q_free=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        do_ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        do_free=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        ds_ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        opened=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        done=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        closed=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    mbarrier.init(shared.kv_ready, count=1)
    mbarrier.init(shared.ds_ready, count=CONSUMERS)
    mbarrier.init(shared.opened, count=1)
    for half in gl.static_range(2):
        mbarrier.init(shared.do_ready.index(half), count=1)
        mbarrier.init(shared.do_free.index(half), count=CONSUMERS)
        mbarrier.init(shared.done.index(half), count=CONSUMERS)
        mbarrier.init(shared.closed.index(half), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(shared.q_ready.index(slot), count=1)
        mbarrier.init(shared.q_free.index(slot), count=CONSUMERS)

    program = program_of(
        cu_seqlens_q, cu_seqlens_k, batch_size, num_heads, group_size, num_members, heads_at_once,
        order_count, q_len, kv_len, num_lines, padded_len, PROGRAM_ROWS, ORDER, PACKED,
    )  # fmt: skip
    seq = program.seq
    heads = program.heads
    if PACKED and program.key_tile * PROGRAM_ROWS >= seq.kv_len:
        return
    edges = Edges(window, prefix_len, shift)
    turns, num_parts = turns_of_program(
        program, edges, order_count, PROGRAM_ROWS, CAUSAL, MASK, ORDER
    )
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
            BLOCK_D + BLOCK_V,
            ORDER,
        )
    inputs = Inputs(q=q_desc, do=do_desc, k=k_desc, v=v_desc, statistics=stat_desc)
    gradients = Gradients(
        dk_ptr, dv_ptr, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs
    )
    # Arguments stand twice, since a tuple with a name would no longer hold constants.
    gl.warp_specialize(
        [
            (accumulate, (shared, dq_sums, gradients, seq, heads, turns, sharing, scale,
                          scale_log2, 0, STAGES, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, CAUSAL,
                          MASK, SOFTCAP, ORDER, SHARED, ONTO)),
            (accumulate, (shared, dq_sums, gradients, seq, heads, turns, sharing, scale,
                          scale_log2, 1, STAGES, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, CAUSAL,
                          MASK, SOFTCAP, ORDER, SHARED, ONTO)),
            (produce, (inputs, shared, heads, seq, turns, STAGES)),
            (open_turns, (counts, shared, heads, seq, turns, sharing, PROGRAM_ROWS, 2, CAUSAL,
                          MASK, SHARED)),
            (close_turns, (counts, shared, heads, seq, turns, sharing, PROGRAM_ROWS, 2, CAUSAL,
                           MASK, SHARED)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, 24, 24, 24],
    )  # fmt: skip
