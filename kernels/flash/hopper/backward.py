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
- Two warps keep the order in which programs add to dQ (:mod:`kernels.flash.hopper.backward_order`).

Above head_dim 128 there is :mod:`kernels.flash.hopper.backward_wide`, or where values are narrower
than keys :mod:`kernels.flash.hopper.backward_narrow`.

docs/kernels.md has a diagram of the warps over time and the budget of shared memory and registers.
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
    add_tile_by_thread,
    bounds_of_loops,
    close_turns,
    number_of_thread,
    open_turns,
    probabilities,
    program_of,
    programs_before,
    rows_of_gradients,
    slope_of_cap,
    start_scores,
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
    columns,
    opaque,
)


class Shared(NamedTuple):
    """A program's shared memory: tiles, then barriers."""

    k_tiles: Any
    v_tiles: Any
    q_tiles: Any
    do_tiles: Any
    lse_tiles: Any
    delta_tiles: Any
    ds_tiles: Any
    """dS^T of this turn and the one before: two halves, two consumers."""
    kv_ready: Any
    q_ready: Any
    do_ready: Any
    free: Any
    ds_ready: Any
    opened: Any
    """Consumers may add to dQ of the part of a turn (backward_order.open_turns)."""
    done: Any
    """Consumers have added to dQ of the part; two, for parts in turn."""
    closed: Any
    """The next program has been told; two, for parts in turn."""


class Views(NamedTuple):
    """The tiles of :class:`Shared` as consumers see them: as matrices and lines."""

    k_parts: Any
    """Keys, 64 by 64: a consumer's parts follow each other."""
    q_tiles: Any
    do_tiles: Any
    lse_tiles: Any
    delta_tiles: Any
    ds_tiles: Any


class HalfTurn(NamedTuple):
    """The dQ to add in this half turn, and the queries that it loads."""

    dq_ptr: Any
    """Address at which this consumer adds to dQ of the turn before."""
    is_first: Any
    """Whether no other program adds to it before this one."""
    has_dq: Any
    """Whether there was a turn before."""
    more: Any
    """Whether another half turn follows."""
    first_key: Any
    """The consumer's first key."""
    first_query: Any
    """The turn's first query."""
    thread: Any
    """Of backward_order.number_of_thread."""


class Progress(NamedTuple):
    """Values that a consumer carries from one half turn to the next."""

    dk: Any
    dv: Any
    dk_tail: Any
    dv_tail: Any
    """Columns of dk and dv behind the first MAIN; 0 if there are none."""
    s: Any
    """Scores of the next half turn, and their lse, where they are computed ahead."""
    lse: Any
    slot: Any
    """Slot of the ring."""
    phase: Any
    parity: Any
    """Parity of the turn, counted through all heads of the program."""


@gluon.jit
def produce(inputs, shared, heads, seq, turns, STAGES: gl.constexpr):
    """Keys and values once; then per half turn Q, dO and the two row statistics."""
    if turns.end > turns.first:
        mbarrier.expect(shared.kv_ready, 2 * CONSUMERS * inputs.k.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            row = seq.k_start + turns.first_key + consumer * ROWS
            tma.async_copy_global_to_shared(
                inputs.k,
                [seq.batch, heads.kv_head, row, 0],
                shared.kv_ready,
                shared.k_tiles.index(consumer),
            )
            tma.async_copy_global_to_shared(
                inputs.v,
                [seq.batch, heads.kv_head, row, 0],
                shared.kv_ready,
                shared.v_tiles.index(consumer),
            )
    slot = 0
    # A ring starts shared.free: waiting for the phase before the first one returns at once.
    phase = 1
    nbytes: gl.constexpr = inputs.q.block_type.nbytes + inputs.statistics.block_type.nbytes
    for member in range(heads.num_members):
        head = heads.first_head + member
        line = seq.batch * heads.num_heads + head
        for half_step in range(2 * turns.first, 2 * turns.end):
            _, tile = tile_of(half_step, PROGRAM_ROWS, 2)
            row = seq.q_start + tile * ROWS
            column = seq.line_start + tile * ROWS
            mbarrier.wait(shared.free.index(slot), phase)
            ready = shared.q_ready.index(slot)
            mbarrier.expect(ready, nbytes)
            tma.async_copy_global_to_shared(
                inputs.q, [seq.batch, head, row, 0], ready, shared.q_tiles.index(slot)
            )
            tma.async_copy_global_to_shared(
                inputs.statistics, [line, column], ready, shared.lse_tiles.index(slot)
            )
            ready = shared.do_ready.index(slot)
            mbarrier.expect(ready, nbytes)
            tma.async_copy_global_to_shared(
                inputs.do, [seq.batch, head, row, 0], ready, shared.do_tiles.index(slot)
            )
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
def after(slot, phase, STAGES: gl.constexpr):
    """The slot of the ring after this one, and its phase."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def start_gradient(a, tile, x, tail, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """dV += P^T dO or dK += dS^T Q, on its way: one matmul, or with TAIL columns two."""
    x = warpgroup_mma(a, columns(tile, 0, MAIN), x, is_async=True)
    if TAIL > 0:
        tail = warpgroup_mma(a, columns(tile, MAIN, TAIL), tail, is_async=True)
    return x, tail


@gluon.jit
def dq_tile(views, tile, column, PARTS: gl.constexpr, N: gl.constexpr):
    """64 by N of dQ = dS K, over both consumers' keys: two matmuls, on their way.

    Args:
        column: the tile's first column in units of 64.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    dq = warpgroup_mma(
        views.ds_tiles.index(tile).permute((1, 0)),
        columns(views.k_parts.index(column), 0, N),
        gl.zeros([ROWS, N], gl.float32, LAYOUT),
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        views.ds_tiles.index(tile + 1).permute((1, 0)),
        columns(views.k_parts.index(PARTS + column), 0, N),
        dq,
        is_async=True,
    )


@gluon.jit
def add_last_dq(
    views,
    dq_ptr,
    parity,
    is_first,
    HALF: gl.constexpr,
    CONSUMER: gl.constexpr,
    PARTS: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
):
    """Compute and add this consumer's tile of dQ of the last turn, for the queries of one half."""
    PART: gl.constexpr = (HALF + CONSUMER) % 2 if PARTS == 2 else 0
    # Of a head_dim up to 32, its columns alone.
    WHOLE: gl.constexpr = MAIN if MAIN < ROWS else ROWS
    N: gl.constexpr = TAIL if PART == 1 and TAIL > 0 else WHOLE
    tile = 4 - 4 * parity + 2 * (CONSUMER if PARTS == 1 else HALF)
    running = dq_tile(views, tile, PART, PARTS, N)
    dq = warpgroup_mma_wait(0, deps=[running])
    add_tile(dq_ptr + (HALF * PARTS + PART) * (ROWS * ROWS), dq, is_first)


@gluon.jit
def half_turn(
    shared,
    views,
    k,
    v,
    before,
    now,
    seq,
    turns,
    scale_log2,
    half,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
    RESIDENT: gl.constexpr,
    APART: gl.constexpr,
    ROLLED: gl.constexpr,
):
    """64 queries: their share of this consumer's dV and dK, and dQ of the turn before.

    ``half`` is 0 or 1: a constant, or where ``ROLLED`` a value, so that both run the same code.

    Where ``RESIDENT``, K and V stay in registers, which halves what matmuls read from shared
    memory, and scores are computed one half turn ahead, behind the matmuls before them.
    """
    dk, dv, dk_tail, dv_tail, s, lse, slot, phase, parity = before
    dtype: gl.constexpr = views.q_tiles.dtype
    LAYOUT: gl.constexpr = s.type.layout
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    LINE: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    PARTS: gl.constexpr = views.q_tiles.shape[2] // ROWS
    # Matmuls that a product over, or into, MAIN + TAIL columns takes.
    EACH: gl.constexpr = 2 if TAIL > 0 else 1
    HALF: gl.constexpr = 0 if ROLLED else half
    # The half of dQ's columns that this consumer computes of this half's queries. Unless the code
    # is the same, it is the other half of the other half's, since the last columns may be fewer.
    PART: gl.constexpr = CONSUMER if ROLLED else (HALF + CONSUMER) % 2 if PARTS == 2 else 0
    WHOLE: gl.constexpr = MAIN if MAIN < ROWS else ROWS
    DQ_COLUMNS: gl.constexpr = TAIL if PART == 1 and TAIL > 0 else WHOLE
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    me = opaque(CONSUMER)
    slot = opaque(slot)
    if not RESIDENT:
        k = k.index(me)
        v = v.index(me)
    # dS of this turn, tiles [half, consumer], and of the turn before.
    new_ds = 4 * opaque(parity)
    old_ds = 4 - new_ds

    # A warp that looks at a barrier, or reads shared memory, waits for all the matmuls that it has
    # started, and those that it would start behind it wait, too. So it looks while none is running.
    if RESIDENT:
        next_slot, next_phase = after(slot, phase, STAGES)
        mbarrier.wait(shared.do_ready.index(slot), phase)
        mbarrier.wait(shared.q_ready.index(next_slot), next_phase, pred=now.more)
        dp = start_scores(v, views.do_tiles.index(slot), zeros, False, MAIN, TAIL)
        minus_delta = views.delta_tiles.index(slot).load(LINE)
    else:
        mbarrier.wait(shared.q_ready.index(slot), phase)
        mbarrier.wait(shared.do_ready.index(slot), phase)
        lse = views.lse_tiles.index(slot).load(LINE)
        # The product starts from minus delta, which so takes no registers beside it.
        dp, _ = gl.broadcast(views.delta_tiles.index(slot).load(LINE)[None, :], zeros)
        s = start_scores(k, views.q_tiles.index(slot), zeros, False, MAIN, TAIL)
        dp = start_scores(v, views.do_tiles.index(slot), dp, True, MAIN, TAIL)
        s = warpgroup_mma_wait(EACH, deps=[s])
    p = probabilities(
        s,
        lse,
        now.first_key,
        now.first_query + half * ROWS,
        turns,
        seq.kv_len,
        scale_log2,
        CAUSAL,
        MASK,
        SOFTCAP,
        MASKED,
    )
    a = gl.convert_layout(p.to(dtype), A_LAYOUT)
    dv, dv_tail = start_gradient(a, views.do_tiles.index(slot), dv, dv_tail, MAIN, TAIL)
    dp = warpgroup_mma_wait(EACH, deps=[dp])
    if RESIDENT:
        dp = dp + minus_delta[None, :]
    ds = p * dp
    if SOFTCAP > 0.0:
        if not RESIDENT:
            # Read again: to keep it takes registers that there are not.
            lse = views.lse_tiles.index(slot).load(LINE)
        ds = ds * slope_of_cap(p, lse, SOFTCAP)
    ds = ds.to(dtype)
    # The other consumer has written dS of the turn before, and read that of two before.
    if ROLLED:
        mbarrier.wait(shared.ds_ready, parity ^ 1, pred=now.has_dq & (half == 0))
    elif HALF == 0:
        mbarrier.wait(shared.ds_ready, parity ^ 1, pred=now.has_dq)
    views.ds_tiles.index(new_ds + 2 * half + CONSUMER).store(ds)
    ds = gl.convert_layout(ds, A_LAYOUT)
    # With 64 columns a consumer takes the queries of one half.
    if PARTS == 2:
        dq = dq_tile(views, old_ds + 2 * half, me - CONSUMER + PART, PARTS, DQ_COLUMNS)
    elif HALF == 0:
        dq = dq_tile(views, old_ds + 2 * CONSUMER, me - CONSUMER, PARTS, DQ_COLUMNS)
    dk, dk_tail = start_gradient(ds, views.q_tiles.index(slot), dk, dk_tail, MAIN, TAIL)
    if RESIDENT:
        # After the last tile these are scores of an old one, which are not used.
        next_s = start_scores(k, views.q_tiles.index(next_slot), zeros, False, MAIN, TAIL)
        lse = views.lse_tiles.index(next_slot).load(LINE)
    if PARTS == 2 or HALF == 0:
        dq = warpgroup_mma_wait(2 if RESIDENT else EACH, deps=[dq])
        # This is of the turn before, whose parity is the opposite one.
        opened = half if APART else parity ^ 1
        if ROLLED:
            mbarrier.wait(shared.opened, opened, pred=now.has_dq & (APART | (half == 0)))
        elif HALF == 0 or APART:
            mbarrier.wait(shared.opened, opened, pred=now.has_dq)
        if now.has_dq:
            dq_ptr = now.dq_ptr + (half * PARTS + PART) * (ROWS * ROWS)
            if RESIDENT:
                add_tile_by_thread(dq_ptr, now.thread, dq, now.is_first)
            else:
                add_tile(dq_ptr, dq, now.is_first)
            if ROLLED:
                mbarrier.arrive(shared.done.index(opened), pred=APART | (half == 1))
            elif HALF == PARTS - 1 or APART:
                mbarrier.arrive(shared.done.index(opened))
    if ROLLED:
        if half == 1:
            fence_async_shared()
            mbarrier.arrive(shared.ds_ready)
        parity ^= half
    elif HALF == 1:
        fence_async_shared()
        mbarrier.arrive(shared.ds_ready)
        parity ^= 1
    if RESIDENT:
        dk, dv, ds, a = warpgroup_mma_wait(1, deps=[dk, dv, ds, a])
        mbarrier.arrive(shared.free.index(slot))
        s = warpgroup_mma_wait(0, deps=[next_s])
    else:
        if TAIL > 0:
            dk, dv, dk_tail, dv_tail, ds, a = warpgroup_mma_wait(
                0, deps=[dk, dv, dk_tail, dv_tail, ds, a]
            )
        else:
            dk, dv, ds, a = warpgroup_mma_wait(0, deps=[dk, dv, ds, a])
        mbarrier.arrive(shared.free.index(slot))
        next_slot, next_phase = after(slot, phase, STAGES)
    return Progress(dk, dv, dk_tail, dv_tail, s, lse, next_slot, next_phase, parity)


@gluon.jit
def take_turns(
    shared,
    views,
    k,
    v,
    progress,
    dq_ptr,
    before,
    of_line,
    member,
    start,
    stop,
    seq,
    heads,
    turns,
    thread,
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
    RESIDENT: gl.constexpr,
    APART: gl.constexpr,
    ROLLED: gl.constexpr,
    ONTO: gl.constexpr,
):
    """The turns of one query head, in steps from ``start`` to ``stop``.

    Args:
        dq_ptr: where this consumer adds to dQ of the turn before.
        before: programs that add to it before this one.
        of_line: dQ of the head's first query.
    """
    # A consumer adds to every other 64-by-64 tile of a turn's dQ.
    FIRST_TILE: gl.constexpr = CONSUMER if BLOCK_D == ROWS else 0
    # An iteration is a turn of two halves, or where ROLLED a half.
    HALVES: gl.constexpr = 1 if ROLLED else 2
    # Where there are sums already, never: without the branch a full mask took 1.07 of the time.
    FIRST: gl.constexpr = -1 if ONTO else 0
    for place in range(2 // HALVES * start, 2 // HALVES * stop):
        step = place >> 1 if ROLLED else place
        turn = turn_of(step)
        for number in gl.static_range(HALVES):
            now = HalfTurn(
                dq_ptr=dq_ptr,
                is_first=before == FIRST,
                has_dq=(member > 0) | (step > turns.first),
                more=((place & 1 if ROLLED else number) == 0)
                | (member + 1 < heads.num_members)
                | (step + 1 < turns.end),
                first_key=turns.first_key + CONSUMER * ROWS,
                first_query=turn * PROGRAM_ROWS,
                thread=thread,
            )
            progress = half_turn(
                shared, views, k, v, progress, now, seq, turns, scale_log2,
                place & 1 if ROLLED else number,
                CONSUMER, STAGES, MAIN, TAIL, CAUSAL, MASK, SOFTCAP, MASKED, RESIDENT, APART,
                ROLLED,
            )  # fmt: skip
        of_turn = of_line + turn * (PROGRAM_ROWS * BLOCK_D) + FIRST_TILE * (ROWS * ROWS)
        before_turn = programs_before(turn, turns, PROGRAM_ROWS, CAUSAL, MASK)
        if ROLLED:
            # dQ of a turn is added during both halves of the next one.
            is_second = (place & 1) > 0
            dq_ptr = gl.where(is_second, of_turn, dq_ptr)
            before = gl.where(is_second, before_turn, before)
        else:
            dq_ptr = of_turn
            before = before_turn
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
    BLOCK_D: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    RESIDENT: gl.constexpr,
    APART: gl.constexpr,
    ROLLED: gl.constexpr,
    UNMASKED: gl.constexpr,
    ORDER: gl.constexpr,
    SHARED: gl.constexpr,
    ONTO: gl.constexpr,
):
    """One consumer: dK and dV of 64 keys, and its half of every turn's dQ."""
    dtype: gl.constexpr = shared.k_tiles.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TAIL if TAIL > 0 else 16, 16]
    )
    TILE: gl.constexpr = gl.NVMMASharedLayout(shared.k_tiles.type.layout.swizzle_byte_width, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = BLOCK_D // ROWS
    DIVIDED: gl.constexpr = ORDER == "bands" or ORDER == "halves" or ORDER == "sections"
    MASKED_LAST: gl.constexpr = ORDER == "heads" or ORDER == "keys"
    AGAIN: gl.constexpr = UNMASKED and (MASK == "window" or MASKED_LAST)
    k = shared.k_tiles._reinterpret(dtype, [CONSUMERS, ROWS, BLOCK_D], TILE)
    v = shared.v_tiles._reinterpret(dtype, [CONSUMERS, ROWS, BLOCK_D], TILE)
    views = Views(
        # The same bytes: 64 columns of 16 bits, one swizzle's width, lie together.
        k_parts=shared.k_tiles._reinterpret(dtype, [CONSUMERS * PARTS, ROWS, ROWS], TILE),
        q_tiles=shared.q_tiles._reinterpret(dtype, [STAGES, ROWS, BLOCK_D], TILE),
        do_tiles=shared.do_tiles._reinterpret(dtype, [STAGES, ROWS, BLOCK_D], TILE),
        lse_tiles=shared.lse_tiles._reinterpret(gl.float32, [STAGES, ROWS], LINE),
        delta_tiles=shared.delta_tiles._reinterpret(gl.float32, [STAGES, ROWS], LINE),
        ds_tiles=shared.ds_tiles,
    )

    first_key = turns.first_key + CONSUMER * ROWS
    dk = gl.zeros([ROWS, MAIN], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, MAIN], gl.float32, D_LAYOUT)
    dk_tail = 0
    dv_tail = 0
    if TAIL > 0:
        dk_tail = gl.zeros([ROWS, TAIL], gl.float32, TAIL_LAYOUT)
        dv_tail = gl.zeros([ROWS, TAIL], gl.float32, TAIL_LAYOUT)
    s = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    lse = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, LAYOUT))
    if turns.end > turns.first:
        mbarrier.wait(shared.kv_ready, 0)
    if RESIDENT:
        k = columns(k.index(CONSUMER), 0, MAIN).load(gl.DotOperandLayout(0, LAYOUT, 2))
        v = columns(v.index(CONSUMER), 0, MAIN).load(gl.DotOperandLayout(0, LAYOUT, 2))
        if turns.end > turns.first:
            mbarrier.wait(shared.q_ready.index(0), 0)
            first_s = start_scores(k, views.q_tiles.index(0), s, False, MAIN, TAIL)
            lse = views.lse_tiles.index(0).load(gl.SliceLayout(0, LAYOUT))
            s = warpgroup_mma_wait(0, deps=[first_s])
    progress = Progress(dk, dv, dk_tail, dv_tail, s, lse, 0, 0, 0)
    thread = number_of_thread(MAIN if MAIN < ROWS else ROWS)
    dq_ptr = dq_sums
    before = 0
    for member in range(heads.num_members):
        line = heads.lines_before + seq.batch * heads.num_heads + heads.first_head + member
        of_line = dq_sums + (line.to(gl.int64) * heads.padded_len + seq.line_start) * BLOCK_D
        for again in range(2 if AGAIN else 1):
            start, middle, stop = bounds_of_loops(turns, again, AGAIN, MASK)
            if not UNMASKED:
                middle = turns.end
            progress, dq_ptr, before = take_turns(
                shared, views, k, v, progress, dq_ptr, before, of_line, member, start, middle,
                seq, heads, turns, thread, scale_log2, CONSUMER, STAGES, BLOCK_D, MAIN, TAIL,
                CAUSAL, MASK, SOFTCAP, True, RESIDENT, APART, ROLLED, ONTO,
            )  # fmt: skip
            if UNMASKED:
                progress, dq_ptr, before = take_turns(
                    shared, views, k, v, progress, dq_ptr, before, of_line, member, middle, stop,
                    seq, heads, turns, thread, scale_log2, CONSUMER, STAGES, BLOCK_D, MAIN, TAIL,
                    CAUSAL, MASK, SOFTCAP, False, RESIDENT, APART, ROLLED, ONTO,
                )  # fmt: skip
    parity = progress.parity
    if turns.end > turns.first:
        # dQ of the last turn.
        mbarrier.wait(shared.ds_ready, parity ^ 1)
        for half in gl.static_range(PARTS):
            opened = half if APART else parity ^ 1
            if half == 0 or APART:
                mbarrier.wait(shared.opened, opened)
            is_first = before == (-1 if ONTO else 0)
            add_last_dq(views, dq_ptr, parity, is_first, half, CONSUMER, PARTS, MAIN, TAIL)
            if half == PARTS - 1 or APART:
                mbarrier.arrive(shared.done.index(opened))
    dk_rows, dv_rows = rows_of_gradients(gradients, seq, heads)
    # The sums are one more part, behind those of the last turn.
    opened = 0 if APART else parity
    if SHARED:
        mbarrier.wait(shared.opened, opened, pred=sharing.adds | sharing.ends)
    OF_DK: gl.constexpr = 2 * CONSUMER * ROWS * BLOCK_D
    OF_DV: gl.constexpr = OF_DK + ROWS * BLOCK_D
    dk = progress.dk * scale
    give(dk, dk_rows, first_key, sharing, OF_DK, 0, HEAD_DIM, SHARED, True, DIVIDED)
    give(progress.dv, dv_rows, first_key, sharing, OF_DV, 0, HEAD_DIM, SHARED, True, DIVIDED)
    if TAIL > 0:
        TAILS: gl.constexpr = ROWS * MAIN
        dk = progress.dk_tail * scale
        give(dk, dk_rows, first_key, sharing, OF_DK + TAILS, MAIN, HEAD_DIM, SHARED, True, DIVIDED)
        dv = progress.dv_tail
        give(dv, dv_rows, first_key, sharing, OF_DV + TAILS, MAIN, HEAD_DIM, SHARED, True, DIVIDED)
    if SHARED:
        mbarrier.arrive(shared.done.index(opened), pred=sharing.adds)


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
def flash_backward(
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
    RESIDENT: gl.constexpr,
    APART: gl.constexpr,
    ROLLED: gl.constexpr,
    UNMASKED: gl.constexpr,
    ORDER: gl.constexpr,
    SHARED: gl.constexpr,
    ONTO: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dK and dV of one tile of keys of one key head, and what these keys add to dQ.

    It takes ``num_members`` of the ``group_size`` query heads that share the key head; where that
    is not all of them, or the turns of a tile are divided, ``SHARED``, programs add up dK and dV
    (:mod:`kernels.flash.hopper.backward_sharing`). Without ``UNMASKED`` every turn takes a mask, as
    all turns of a short window need one (schedule.has_unmasked_turns). ``APART``:
    backward_schedule.halves_apart. ``ROLLED``: backward_schedule.halves_rolled. ``ORDER`` says how
    programs go through their turns, and ``order_count`` how many of what it concerns; the functions
    are those of backward_schedule:

    - "none": from the first to the last.
    - "heads": of the last ``order_count`` heads from the last to the first (heads_turned).
    - "keys": of the first ``order_count`` tiles of all heads (keys_turned).
    - "bands": a tile's turns are divided among programs, ``order_count`` each (bands_of).
    - "halves": likewise in two, and the second goes from its last to its first.
    - "sections": the turns of a head are divided, ``order_count`` each (sections_of).

    dq_sums is [num_lines, padded_len, BLOCK_D] float32, tiles of 64 by 64 in the order of
    :func:`by_thread`, of which up to head_dim 32 as many columns as ``MAIN`` are written; or where
    ``ONTO`` such sums of other keys, which it adds to; counts is [num_lines, padded_len / 64]
    int32, zero at the start. Where ``ORDER`` is "keys", there are twice as many lines of both:
    first those of keys that are turned, then those of the others. Each band has lines of its own.
    ``heads_at_once``: the function of that name, and of divided turns, or "keys", all heads.
    """
    dtype: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        k_tiles=gl.allocate_shared_memory(
            dtype, [CONSUMERS] + k_desc.block_type.shape, k_desc.layout
        ),
        v_tiles=gl.allocate_shared_memory(
            dtype, [CONSUMERS] + v_desc.block_type.shape, v_desc.layout
        ),
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
        ds_tiles=gl.allocate_shared_memory(dtype, [8, ROWS, ROWS], gl.NVMMASharedLayout(128, 16)),
        kv_ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        ds_ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        opened=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        done=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        closed=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        q_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        do_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    mbarrier.init(shared.kv_ready, count=1)
    mbarrier.init(shared.ds_ready, count=CONSUMERS)
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
            2 * BLOCK_D,
            ORDER,
        )
    gl.static_assert(not APART or BLOCK_D == 2 * ROWS)
    gl.static_assert(not ROLLED or MAIN == 2 * ROWS)
    PARTS: gl.constexpr = 2 if APART else 1
    inputs = Inputs(q=q_desc, do=do_desc, k=k_desc, v=v_desc, statistics=stat_desc)
    gradients = Gradients(
        dk_ptr, dv_ptr, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs
    )
    # Arguments stand twice, since a tuple with a name would no longer hold constants.
    gl.warp_specialize(
        [
            (accumulate, (shared, dq_sums, gradients, seq, heads, turns, sharing, scale,
                          scale_log2, 0, STAGES, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL, MASK,
                          SOFTCAP, RESIDENT, APART, ROLLED, UNMASKED, ORDER, SHARED, ONTO)),
            (accumulate, (shared, dq_sums, gradients, seq, heads, turns, sharing, scale,
                          scale_log2, 1, STAGES, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL, MASK,
                          SOFTCAP, RESIDENT, APART, ROLLED, UNMASKED, ORDER, SHARED, ONTO)),
            (produce, (inputs, shared, heads, seq, turns, STAGES)),
            (open_turns, (counts, shared, heads, seq, turns, sharing, PROGRAM_ROWS, PARTS,
                          CAUSAL, MASK, SHARED)),
            (close_turns, (counts, shared, heads, seq, turns, sharing, PROGRAM_ROWS, PARTS,
                           CAUSAL, MASK, SHARED)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, 24, 24, 24],
    )  # fmt: skip
