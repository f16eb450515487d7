"""FlashAttention forward for Hopper (compute capability 9.0) in Gluon, Triton's lower level.

One program computes ``TILES`` tiles of queries of one head, one after another; a tile has 64 of
them for each of the ``CONSUMERS``, two or three. Its warps have roles:

- A producer warp keeps a ring of ``STAGES`` key and value tiles in shared memory filled through
  the tensor memory accelerator (TMA), the last visible tile first.
- Each consumer is one warpgroup and owns 64 of the queries. For every key tile it issues
  S_j = Q K_j^T and, while that runs, O += P_{j+1} V_{j+1} for the tile before; then it finds
  the largest scores of S_j while the second matmul is still running. The rest of the softmax waits
  for that matmul, so that P_j takes the registers of P_{j+1}: three consumers have no others, and
  of two the compiler would copy P from one to the other. Consumers are independent of each other,
  so that the softmax of one runs beside the matmuls of the others.

Key tiles run from the diagonal to the left. The first ones cross the mask and compare indices;
the others do not, until a window ends on the left: tiles that cross that end compare indices again.
The schedule is the one of FlashAttention-3 (arXiv:2407.08608, section 3).

A multiprocessor has room for one program, so that what a program begins and ends with is exposed:
setting up barriers, the first copies, the stores of the results. With more than one tile the
producer runs ahead into the next one while the consumers finish and store the one before. Where
that pays says :mod:`kernels.flash.hopper.program_size`.

The ring knows nothing of query tiles; its barriers do. A query tile with n > 0 visible key tiles
takes n + 1 of the ring's steps, since a slot holds the keys of a tile and the values of the one
before: the first step brings no values, the last one no keys. One with none takes no step. In each
step each of a slot's three barriers goes through one phase, with data or without, so that one
parity serves them all: the producer arrives at what brings no data, and consumers free every slot.

Queries have ``Q_SLOTS`` places in turn, and no barrier says that one is free: before the producer
fills it again, it has waited for slots of the ring that were free only after all that read these
queries (:func:`flash_forward`).

Values may have fewer columns than keys, as latent attention has them. Queries and keys of 192
columns then lie in ``PANELS`` of 64, each a tile of its own: as one tile, padded to a power of two,
a key tile of 128 would find no room.

docs/kernels.md has a diagram of the warps over time and the budget of shared memory and registers.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from kernels.flash.hopper.forward_tile import (
    LAZY_COLUMNS,
    Head,
    Inputs,
    Outputs,
    finish,
    from_words,
    masked,
    panels_at,
    place_in_batch,
    query_tile,
    raise_reference,
    rescale,
    row_sums_by_thread,
    softmax_step,
    start_scores,
    start_values,
    to_words,
)
from kernels.flash.hopper.tiles import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    PANEL_COLUMNS,
    ROWS,
    Edges,
    capped,
    key_tiles,
    sequence,
)


class Shared(NamedTuple):
    """A program's shared memory: tiles, and barriers that tell when a tile has come or is free."""

    q_tiles: Any
    """One for each place and consumer."""
    k_tiles: Any
    v_tiles: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    free: Any


class Progress(NamedTuple):
    """Values that a consumer carries from one key tile to the next."""

    words: Any
    """Probabilities of the last key tile, whose values come next, as :func:`to_words` has them."""
    o: Any
    reference: Any
    """Of the scores in units of log2, near their running maximum: rounded once, it serves all."""
    total: Any
    """Running denominator, apart by thread."""
    slot: Any
    """Slot of the ring."""
    phase: Any


@gluon.jit
def produce(
    inputs,
    shared,
    head,
    seq,
    edges,
    CONSUMERS: gl.constexpr,
    TILES: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PANELS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
):
    """The producer: TMA copies of each tile's queries, and of keys and values right to left."""
    TILE_ROWS: gl.constexpr = CONSUMERS * ROWS
    slot = 0
    # A ring starts free: waiting for the phase before the first one returns at once.
    phase = 1
    # Query tiles so far that see keys: others take no place.
    filled = 0
    for turn in range(TILES):
        first = query_tile(turn, head, TILES, CAUSAL) * TILE_ROWS
        tiles = key_tiles(first, seq.q_len, seq.kv_len, edges, TILE_ROWS, BLOCK_K, CAUSAL, MASK)
        num_key_tiles = tiles.stop - tiles.start
        if num_key_tiles > 0:
            place = filled % Q_SLOTS
            mbarrier.expect(
                shared.q_ready.index(place), CONSUMERS * PANELS * inputs.q.block_type.nbytes
            )
            for consumer in gl.static_range(CONSUMERS):
                for panel in gl.static_range(PANELS):
                    tma.async_copy_global_to_shared(
                        inputs.q,
                        [
                            seq.batch,
                            head.head,
                            seq.q_start + first + consumer * ROWS,
                            panel * PANEL_COLUMNS,
                        ],
                        shared.q_ready.index(place),
                        shared.q_tiles.index((place * CONSUMERS + consumer) * PANELS + panel),
                    )
            filled += 1
        num_steps = gl.where(num_key_tiles > 0, num_key_tiles + 1, 0)
        for step in range(num_steps):
            row = seq.k_start + (tiles.stop - 1 - step) * BLOCK_K
            mbarrier.wait(shared.free.index(slot), phase)
            if step < num_key_tiles:
                mbarrier.expect(shared.k_ready.index(slot), PANELS * inputs.k.block_type.nbytes)
                for panel in gl.static_range(PANELS):
                    tma.async_copy_global_to_shared(
                        inputs.k,
                        [seq.batch, head.kv_head, row, panel * PANEL_COLUMNS],
                        shared.k_ready.index(slot),
                        shared.k_tiles.index(slot * PANELS + panel),
                    )
            elif TILES > 1:
                # Before the values: a consumer that has seen these has passed this phase as well.
                mbarrier.arrive(shared.k_ready.index(slot))
            if step > 0:
                mbarrier.expect(shared.v_ready.index(slot), inputs.v.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    inputs.v,
                    [seq.batch, head.kv_head, row + BLOCK_K, 0],
                    shared.v_ready.index(slot),
                    shared.v_tiles.index(slot),
                )
            else:
                # These values are not waited for; but before the slot's next ones are, there
                # is a wait for another slot, which is filled after this one.
                mbarrier.arrive(shared.v_ready.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def advance(
    shared,
    q_tile,
    before,
    tile,
    more,
    first_row,
    seq,
    edges,
    scale_log2,
    STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    PANELS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Scores of key tile ``tile`` while the values of the tile before are added to o.

    The ring's slot holds both: the keys of a tile and the values of the one before.

    Args:
        more: whether another key tile follows.

    Returns:
        The progress after it.
    """
    words, o, reference, total, slot, phase = before
    dtype: gl.constexpr = shared.q_tiles.dtype
    LAZY: gl.constexpr = o.shape[1] >= LAZY_COLUMNS
    p = from_words(words, dtype, gl.DotOperandLayout(0, o.type.layout, 2))
    if PANELS == 1:
        k_tile = shared.k_tiles.index(slot)
    else:
        k_tile = panels_at(shared.k_tiles, slot, PANELS)
    s = start_scores(q_tile, k_tile, MAIN, TAIL, PANELS)
    mbarrier.wait(shared.v_ready.index(slot), phase)
    o = start_values(p, shared.v_tiles.index(slot), o)
    s = warpgroup_mma_wait(1, deps=[s])
    if SOFTCAP > 0.0:
        s = capped(s, scale_log2, SOFTCAP)
        scale_log2 = 1.0
    if MASKED:
        s = masked(s, tile, first_row, seq, edges, BLOCK_K, CAUSAL, MASK)
    reference, zero, shrink = raise_reference(s, reference, scale_log2, LAZY, MASKED)
    next_slot = slot + 1
    if next_slot == STAGES:
        next_slot = 0
        phase ^= 1
    # Both keep the maximum before the wait below, so that it is found beside the matmul: shrink as
    # a dependency holds for LLVM, and the loop that waits for the next keys holds for ptxas, which
    # would hoist the matmul's wait within a basic block. s as a dependency keeps probabilities
    # behind the wait.
    mbarrier.wait(shared.k_ready.index(next_slot), phase, pred=more)
    o, p, s, shrink = warpgroup_mma_wait(0, deps=[o, p, s, shrink])
    mbarrier.arrive(shared.free.index(slot))
    new_p, total = softmax_step(s, zero, shrink, total, scale_log2)
    o = rescale(o, shrink, LAZY)
    return Progress(to_words(new_p, dtype), o, reference, total, next_slot, phase)


@gluon.jit
def consume(
    CONSUMER: gl.constexpr,
    shared,
    head,
    seq,
    edges,
    outputs,
    scale_log2,
    CONSUMERS: gl.constexpr,
    TILES: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_V: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    PANELS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """One consumer: 64 queries of each tile over all visible key tiles, then o, lse to memory."""
    dtype: gl.constexpr = shared.q_tiles.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    # Above 64 all stored columns: in parts, as S takes them, O takes longer (docs/kernels.md).
    O_COLUMNS: gl.constexpr = MAIN if BLOCK_V == ROWS else BLOCK_V
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O_COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LAZY: gl.constexpr = BLOCK_V >= LAZY_COLUMNS
    TILE_ROWS: gl.constexpr = CONSUMERS * ROWS
    COLUMNS: gl.constexpr = BLOCK_D // PANELS

    # Copies come as [1, 1, rows, D]; the matmuls see [rows, D] of the same bytes.
    TILE: gl.constexpr = gl.NVMMASharedLayout(shared.q_tiles.type.layout.swizzle_byte_width, 16)
    shared = Shared(
        q_tiles=shared.q_tiles._reinterpret(
            dtype, [Q_SLOTS * CONSUMERS * PANELS, ROWS, COLUMNS], TILE
        ),
        k_tiles=shared.k_tiles._reinterpret(dtype, [STAGES * PANELS, BLOCK_K, COLUMNS], TILE),
        v_tiles=shared.v_tiles._reinterpret(dtype, [STAGES, BLOCK_K, BLOCK_V], TILE),
        q_ready=shared.q_ready,
        k_ready=shared.k_ready,
        v_ready=shared.v_ready,
        free=shared.free,
    )
    slot = 0
    phase = 0
    filled = 0
    for turn in range(TILES):
        first = query_tile(turn, head, TILES, CAUSAL) * TILE_ROWS
        tiles = key_tiles(first, seq.q_len, seq.kv_len, edges, TILE_ROWS, BLOCK_K, CAUSAL, MASK)
        num_key_tiles = tiles.stop - tiles.start
        place = filled % Q_SLOTS
        q_place = place * CONSUMERS + CONSUMER
        if PANELS == 1:
            q_tile = shared.q_tiles.index(q_place)
        else:
            q_tile = panels_at(shared.q_tiles, q_place, PANELS)
        first_row = first + CONSUMER * ROWS
        reference = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        total = row_sums_by_thread(gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT))
        o = gl.zeros([ROWS, O_COLUMNS], gl.float32, O_LAYOUT)
        if num_key_tiles > 0:
            mbarrier.wait(shared.q_ready.index(place), filled // Q_SLOTS & 1)
            filled += 1
            mbarrier.wait(shared.k_ready.index(slot), phase)
            if PANELS == 1:
                k_tile = shared.k_tiles.index(slot)
            else:
                k_tile = panels_at(shared.k_tiles, slot, PANELS)
            s = start_scores(q_tile, k_tile, MAIN, TAIL, PANELS)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(shared.free.index(slot))
            scale = scale_log2
            if SOFTCAP > 0.0:
                s = capped(s, scale_log2, SOFTCAP)
                scale = 1.0
            s = masked(s, tiles.stop - 1, first_row, seq, edges, BLOCK_K, CAUSAL, MASK)
            reference, zero, shrink = raise_reference(s, reference, scale, LAZY, True)
            p, total = softmax_step(s, zero, shrink, total, scale)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            # With a predicate in place of the branch Triton adds a barrier of warps to the loops.
            if num_key_tiles > 1:
                mbarrier.wait(shared.k_ready.index(slot), phase)
            progress = Progress(to_words(p, dtype), o, reference, total, slot, phase)
            left = 0
            num_left = 0
            if MASK == "window":
                # The first tile has been visited.
                left = gl.minimum(tiles.unmasked_start, tiles.stop - 1)
                num_left = left - tiles.start
            for step in range(tiles.stop - 1 - tiles.unmasked_stop):
                progress = advance(
                    shared, q_tile, progress, tiles.stop - 2 - step, step + 2 < num_key_tiles,
                    first_row, seq, edges, scale_log2, STAGES, BLOCK_K, MAIN, TAIL, PANELS, CAUSAL,
                    MASK, SOFTCAP, True,
                )  # fmt: skip
            num_plain = gl.minimum(tiles.unmasked_stop, tiles.stop - 1) - left
            for step in range(num_plain):
                progress = advance(
                    shared, q_tile, progress, 0, step + 1 < num_plain + num_left,
                    first_row, seq, edges, scale_log2, STAGES, BLOCK_K, MAIN, TAIL, PANELS, CAUSAL,
                    MASK, SOFTCAP, False,
                )  # fmt: skip
            if MASK == "window":
                for step in range(num_left):
                    progress = advance(
                        shared, q_tile, progress, left - 1 - step, step + 1 < num_left,
                        first_row, seq, edges, scale_log2, STAGES, BLOCK_K, MAIN, TAIL, PANELS,
                        CAUSAL, MASK, SOFTCAP, True,
                    )  # fmt: skip
            words, o, reference, total, slot, phase = progress
            p = from_words(words, dtype, P_LAYOUT)
            mbarrier.wait(shared.v_ready.index(slot), phase)
            o = start_values(p, shared.v_tiles.index(slot), o)
            o = warpgroup_mma_wait(0, deps=[o])
            if TILES > 1:
                mbarrier.arrive(shared.free.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1

        finish(o, reference, total, first_row, head, seq, outputs, VALUE_DIM)


# Windows and shifts differ from call to call, and gain nothing from being known.
@gluon.jit(do_not_specialize=["batch_size", "window", "prefix_len", "shift"])
def flash_forward(
    q_desc,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    stride_ob,
    stride_oh,
    stride_os,
    batch_size,
    num_heads,
    group_size,
    heads_at_once,
    q_len,
    kv_len,
    lse_len,
    window,
    prefix_len,
    shift,
    scale_log2,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILES: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_V: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    PANELS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """o = softmax(q k^T scale) v and its log-sum-exp, for ``TILES`` query tiles of one head."""
    # A ring of one slot could not be refilled while it is read, and its barriers lose their count.
    gl.static_assert(STAGES >= 2)
    # A query tile takes at least two of the ring's steps, the last of which reads no queries, and a
    # step begins only when the one STAGES before is over. So these many places are enough.
    ENOUGH: gl.constexpr = (STAGES + 2) // 2
    Q_SLOTS: gl.constexpr = TILES if TILES < ENOUGH else ENOUGH
    dtype: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        q_tiles=gl.allocate_shared_memory(
            dtype, [Q_SLOTS * CONSUMERS * PANELS] + q_desc.block_type.shape, q_desc.layout
        ),
        k_tiles=gl.allocate_shared_memory(
            dtype, [STAGES * PANELS] + k_desc.block_type.shape, k_desc.layout
        ),
        v_tiles=gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout),
        q_ready=gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], BARRIER),
        k_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        v_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    batch, number, program, num_programs = place_in_batch(
        cu_seqlens_q, batch_size, num_heads, heads_at_once, TILES * CONSUMERS * ROWS, PACKED
    )
    if PACKED and program >= num_programs:
        return
    seq = sequence(cu_seqlens_q, cu_seqlens_k, batch, q_len, kv_len, PACKED)
    num_tiles = gl.cdiv(seq.q_len, CONSUMERS * ROWS)
    head = Head(number, number // group_size, num_tiles, program, num_programs)
    for place in gl.static_range(Q_SLOTS):
        mbarrier.init(shared.q_ready.index(place), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(shared.k_ready.index(slot), count=1)
        mbarrier.init(shared.v_ready.index(slot), count=1)
        mbarrier.init(shared.free.index(slot), count=CONSUMERS)

    inputs = Inputs(q_desc, k_desc, v_desc)
    outputs = Outputs(o_ptr, lse_ptr, stride_ob, stride_oh, stride_os, num_heads, lse_len)
    edges = Edges(window, prefix_len, shift)
    if MASK == "plain":
        # Else the warps would be handed numbers that they do not use.
        edges = Edges(0, 0, 0)
    # Arguments stand twice, since a tuple with a name would no longer hold constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, VALUE_DIM, BLOCK_D, BLOCK_V, MAIN, TAIL,
                           PANELS, CAUSAL, MASK, SOFTCAP)),
                (consume, (1, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, VALUE_DIM, BLOCK_D, BLOCK_V, MAIN, TAIL,
                           PANELS, CAUSAL, MASK, SOFTCAP)),
                (produce, (inputs, shared, head, seq, edges, CONSUMERS, TILES, Q_SLOTS, STAGES,
                           BLOCK_K, PANELS, CAUSAL, MASK)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, VALUE_DIM, BLOCK_D, BLOCK_V, MAIN, TAIL,
                           PANELS, CAUSAL, MASK, SOFTCAP)),
                (consume, (1, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, VALUE_DIM, BLOCK_D, BLOCK_V, MAIN, TAIL,
                           PANELS, CAUSAL, MASK, SOFTCAP)),
                (consume, (2, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, VALUE_DIM, BLOCK_D, BLOCK_V, MAIN, TAIL,
                           PANELS, CAUSAL, MASK, SOFTCAP)),
                (produce, (inputs, shared, head, seq, edges, CONSUMERS, TILES, Q_SLOTS, STAGES,
                           BLOCK_K, PANELS, CAUSAL, MASK)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, 24],
        )  # fmt: skip
