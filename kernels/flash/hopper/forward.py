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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.flash.hopper.tiles import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LN_2,
    MINUS_INFINITY,
    ROWS,
    Edges,
    Rows,
    capped,
    columns,
    hide,
    key_bounds,
    key_tiles,
    sequence,
    store_rows,
)


class Inputs(NamedTuple):
    """Descriptors of the tensors that TMA copies from."""

    q: Any
    k: Any
    v: Any


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


class Head(NamedTuple):
    """The query head of a program, and how many query tiles and programs it has."""

    head: Any
    kv_head: Any
    num_tiles: Any
    program: Any
    """Which of the head's programs this is."""
    num_programs: Any


class Outputs(NamedTuple):
    """Destinations: o [B, H, S, D] with its strides, and contiguous lse [B, H, lse_len]."""

    o_ptr: Any
    lse_ptr: Any
    stride_ob: Any
    stride_oh: Any
    stride_os: Any
    num_heads: Any
    lse_len: Any


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
def place_in_order(heads_at_once):
    """The head, of all in the batch, and the number among its programs, of this program.

    The hardware starts programs in order. Of ``heads_at_once`` heads the first program of each
    comes first, then the second of each: under a causal mask the longest, so that short ones are
    left for the end.
    """
    num_programs = gl.num_programs(0)
    index = gl.program_id(1) * num_programs + gl.program_id(0)
    first_head = index // (heads_at_once * num_programs) * heads_at_once
    width = gl.minimum(heads_at_once, gl.num_programs(1) - first_head)
    place = index - first_head * num_programs
    return first_head + place % width, place // width


@gluon.jit
def query_tile(turn, head, TILES: gl.constexpr, CAUSAL: gl.constexpr):
    """The query tile, of a head's ``num_tiles``, that this program computes in turn ``turn``.

    Longest tiles first: the hardware hands out programs in order, and short ones fill the end.
    Under a causal mask every other turn goes through the programs backwards, so that the longest
    tile goes with the shortest one; if there is an odd number, the longest of all stays alone, and
    all programs have equally many key tiles.

    Returns:
        The tile, or one at or behind ``num_tiles`` if no more is left.
    """
    if not CAUSAL:
        return head.program * TILES + turn
    backwards = head.num_programs - 1 - head.program
    place = turn * head.num_programs + gl.where(turn % 2 == 0, head.program, backwards)
    return gl.where(place < head.num_tiles, head.num_tiles - 1 - place, head.num_tiles)


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
            mbarrier.expect(shared.q_ready.index(place), CONSUMERS * inputs.q.block_type.nbytes)
            for consumer in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    inputs.q,
                    [seq.batch, head.head, seq.q_start + first + consumer * ROWS, 0],
                    shared.q_ready.index(place),
                    shared.q_tiles.index(place * CONSUMERS + consumer),
                )
            filled += 1
        num_steps = gl.where(num_key_tiles > 0, num_key_tiles + 1, 0)
        for step in range(num_steps):
            row = seq.k_start + (tiles.stop - 1 - step) * BLOCK_K
            mbarrier.wait(shared.free.index(slot), phase)
            if step < num_key_tiles:
                mbarrier.expect(shared.k_ready.index(slot), inputs.k.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    inputs.k,
                    [seq.batch, head.kv_head, row, 0],
                    shared.k_ready.index(slot),
                    shared.k_tiles.index(slot),
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
def masked(
    s,
    tile,
    first_row,
    seq,
    edges,
    BLOCK_K: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
):
    """Scores with minus infinity where the key is out of sight."""
    LAYOUT: gl.constexpr = s.type.layout
    key, first, last = key_bounds(
        tile, first_row, seq.q_len, seq.kv_len, edges, BLOCK_K, CAUSAL, MASK, LAYOUT
    )
    return hide(s, key[None, :], first[:, None], last[:, None], MASK, MINUS_INFINITY)


@gluon.jit
def by_thread(x):
    """[ROWS, N] in a wgmma accumulator's layout as [ROWS, a, b, 4, 2] with the 4 over threads.

    Each of the four threads that share a row has N / 4 of its entries. Reducing axis by axis
    gives short independent chains of instructions where a reduction over N is one long one.
    """
    N: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, 4, N // 32, 4, 2])


@gluon.jit
def row_sums_by_thread(x):
    """[ROWS, N] -> [ROWS, 4]: each thread's own part of the sum of its rows."""
    return gl.sum(gl.sum(gl.sum(by_thread(x), axis=4), axis=2), axis=1)


@gluon.jit
def row_max(x):
    """[ROWS, N] -> [ROWS], in the layout of x's rows."""
    part = gl.max(gl.max(gl.max(by_thread(x), axis=4), axis=2), axis=1)
    return gl.convert_layout(gl.max(part, axis=1), gl.SliceLayout(1, x.type.layout))


LAZY_COLUMNS: gl.constexpr = gl.constexpr(256)
"""Of O, from which on it is rescaled only where it has to be. With fewer, its multiplications run
beside the exponentials, and leaving some out took 2 to 14% longer (docs/kernels.md)."""
GROWTH: gl.constexpr = gl.constexpr(8.0)
"""Units of log2 by which scores may exceed the reference before it is raised where O is rescaled
lazily, as flash-attn-4 has it. Probabilities are up to 2^8 then, with the same relative error."""

_NUMBERS = 32
"""Of a thread, which one block of assembly multiplies: of two rows, in pairs of neighbours."""
_IF_ANY = (
    "{.reg .pred p, q; setp.neu.f32 p, $64, 0f3F800000; setp.neu.or.f32 p, $66, 0f3F800000, p;"
    " vote.sync.any.pred q, p, 0xffffffff; @!q bra DONE; "
)
_PRODUCTS = " ".join(
    f"mul.f32 ${i}, ${_NUMBERS + i}, ${2 * _NUMBERS + i};" for i in range(_NUMBERS)
)
RESCALE: gl.constexpr = gl.constexpr(_IF_ANY + _PRODUCTS + " DONE: }")
RESCALE_OPERANDS: gl.constexpr = gl.constexpr(
    ",".join(["=f"] * _NUMBERS + [str(i) for i in range(_NUMBERS)] + ["f"] * _NUMBERS)
)


@gluon.jit
def rescale(o, shrink, LAZY: gl.constexpr):
    """o [ROWS, D] times the factor of each row: if lazily, in warps with a factor other than 1."""
    by_row = gl.convert_layout(shrink, gl.SliceLayout(1, o.type.layout))[:, None]
    if not LAZY:
        return o * by_row
    return gl.inline_asm_elementwise(
        RESCALE, RESCALE_OPERANDS, [o, by_row], dtype=gl.float32, is_pure=True, pack=32
    )


@gluon.jit
def raise_reference(s, reference, scale_log2, LAZY: gl.constexpr, MASKED: gl.constexpr):
    """The new reference of the scores, in units of log2: their maximum, or up to GROWTH less.

    Args:
        LAZY: whether it is left, by up to GROWTH below it, and O rescaled only where it was raised.

    Returns:
        The reference; what to take away from scores, which differs from it in rows that have seen
        no key yet (-inf - -inf is not a number); and the factor by which what was accumulated
        before has to shrink.
    """
    # The maximum, or the choice, stands between a product and a difference, which the compiler else
    # joins in one instruction that does not round: so a reference that stays gives exactly 1.
    largest = row_max(s) * scale_log2
    if LAZY:
        new_reference = gl.where(largest > reference + GROWTH, largest, reference)
    else:
        new_reference = gl.maximum(reference, largest)
    zero = new_reference
    if MASKED:
        zero = gl.where(new_reference == float("-inf"), 0.0, new_reference)
    return new_reference, zero, gl.exp2(reference - zero)


@gluon.jit
def softmax_step(s, zero, shrink, total, scale_log2):
    """Probabilities of scores, and the new denominator.

    The denominator ``total`` stays apart by thread, [ROWS, 4]; only the end adds the four up.
    """
    p = gl.exp2(s * scale_log2 - zero[:, None])
    by_row = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))
    return p, total * by_row[:, None] + row_sums_by_thread(p)


@gluon.jit
def to_words(p, dtype: gl.constexpr):
    """[ROWS, N] float32 as [ROWS, N / 2] of two 16-bit numbers each.

    Triton carries 16-bit numbers through a loop one by one, and takes them out of registers and
    puts them back with two instructions for each pair: 64 of 464 for a key tile.
    """
    N: gl.constexpr = p.shape[1]
    NARROW: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    even, odd = gl.split(p.reshape([ROWS, N // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + NARROW + ".f32 $0, $2, $1;",
        "=r,r,r",
        [even, odd],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def from_words(words, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """:func:`to_words`'s numbers again, [ROWS, N], as a matmul takes them."""
    N: gl.constexpr = 2 * words.shape[1]
    if dtype == gl.bfloat16:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [words],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [words],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=1,
        )
    return gl.convert_layout(gl.join(even, odd).reshape([ROWS, N]), LAYOUT)


@gluon.jit
def start_scores(q_tile, k_tile, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """S = Q K^T over MAIN + TAIL columns, on its way: one matmul, or two."""
    BLOCK_K: gl.constexpr = k_tile.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    s = warpgroup_mma(
        columns(q_tile, 0, MAIN),
        columns(k_tile, 0, MAIN).permute((1, 0)),
        gl.zeros([ROWS, BLOCK_K], gl.float32, LAYOUT),
        use_acc=False,
        is_async=True,
    )
    if TAIL > 0:
        s = warpgroup_mma(
            columns(q_tile, MAIN, TAIL),
            columns(k_tile, MAIN, TAIL).permute((1, 0)),
            s,
            is_async=True,
        )
    return s


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
    s = start_scores(q_tile, shared.k_tiles.index(slot), MAIN, TAIL)
    mbarrier.wait(shared.v_ready.index(slot), phase)
    o = warpgroup_mma(p, shared.v_tiles.index(slot), o, is_async=True)
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
def finish(o, reference, total, first_row, head, seq, outputs, HEAD_DIM: gl.constexpr):
    """o and lse of 64 queries to memory, of their sums over all visible keys."""
    ROW: gl.constexpr = reference.type.layout
    total = gl.convert_layout(gl.sum(total, axis=1), ROW)
    safe_total = gl.where(total == 0.0, 1.0, total)
    o = o / gl.convert_layout(safe_total, gl.SliceLayout(1, o.type.layout))[:, None]
    # exp2 and log2 are the hardware's; lse is kept in the natural logarithm.
    lse = (reference + gl.log2(safe_total)) * LN_2
    lse = gl.where(total == 0.0, float("-inf"), lse)
    lse_row = first_row + gl.arange(0, ROWS, ROW)
    line = (seq.batch * outputs.num_heads + head.head).to(gl.int64)
    lse_base = line * outputs.lse_len + seq.q_start
    gl.store(outputs.lse_ptr + lse_base + lse_row, lse, mask=lse_row < seq.q_len)
    rows = Rows(
        pointer=outputs.o_ptr,
        stride_b=outputs.stride_ob,
        stride_h=outputs.stride_oh,
        stride_s=outputs.stride_os,
        batch=seq.batch,
        head=head.head,
        start=seq.q_start,
        length=seq.q_len,
    )
    store_rows(o, rows, first_row, 0, HEAD_DIM)


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
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """One consumer: 64 queries of each tile over all visible key tiles, then o, lse to memory."""
    dtype: gl.constexpr = shared.q_tiles.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    # All stored columns: in parts, as S takes them, O takes longer (docs/kernels.md).
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LAZY: gl.constexpr = BLOCK_D >= LAZY_COLUMNS
    TILE_ROWS: gl.constexpr = CONSUMERS * ROWS

    # Copies come as [1, 1, rows, D]; the matmuls see [rows, D] of the same bytes.
    TILE: gl.constexpr = gl.NVMMASharedLayout(shared.q_tiles.type.layout.swizzle_byte_width, 16)
    shared = Shared(
        q_tiles=shared.q_tiles._reinterpret(dtype, [Q_SLOTS * CONSUMERS, ROWS, BLOCK_D], TILE),
        k_tiles=shared.k_tiles._reinterpret(dtype, [STAGES, BLOCK_K, BLOCK_D], TILE),
        v_tiles=shared.v_tiles._reinterpret(dtype, [STAGES, BLOCK_K, BLOCK_D], TILE),
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
        q_tile = shared.q_tiles.index(place * CONSUMERS + CONSUMER)
        first_row = first + CONSUMER * ROWS
        reference = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        total = row_sums_by_thread(gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT))
        o = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
        if num_key_tiles > 0:
            mbarrier.wait(shared.q_ready.index(place), filled // Q_SLOTS & 1)
            filled += 1
            mbarrier.wait(shared.k_ready.index(slot), phase)
            s = start_scores(q_tile, shared.k_tiles.index(slot), MAIN, TAIL)
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
                    first_row, seq, edges, scale_log2, STAGES, BLOCK_K, MAIN, TAIL, CAUSAL, MASK,
                    SOFTCAP, True,
                )  # fmt: skip
            num_plain = gl.minimum(tiles.unmasked_stop, tiles.stop - 1) - left
            for step in range(num_plain):
                progress = advance(
                    shared, q_tile, progress, 0, step + 1 < num_plain + num_left,
                    first_row, seq, edges, scale_log2, STAGES, BLOCK_K, MAIN, TAIL, CAUSAL, MASK,
                    SOFTCAP, False,
                )  # fmt: skip
            if MASK == "window":
                for step in range(num_left):
                    progress = advance(
                        shared, q_tile, progress, left - 1 - step, step + 1 < num_left,
                        first_row, seq, edges, scale_log2, STAGES, BLOCK_K, MAIN, TAIL, CAUSAL,
                        MASK, SOFTCAP, True,
                    )  # fmt: skip
            words, o, reference, total, slot, phase = progress
            p = from_words(words, dtype, P_LAYOUT)
            mbarrier.wait(shared.v_ready.index(slot), phase)
            o = warpgroup_mma(p, shared.v_tiles.index(slot), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            if TILES > 1:
                mbarrier.arrive(shared.free.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1

        finish(o, reference, total, first_row, head, seq, outputs, HEAD_DIM)


# Windows and shifts differ from call to call, and gain nothing from being known.
@gluon.jit(do_not_specialize=["window", "prefix_len", "shift"])
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
            dtype, [Q_SLOTS * CONSUMERS] + q_desc.block_type.shape, q_desc.layout
        ),
        k_tiles=gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout),
        v_tiles=gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout),
        q_ready=gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], BARRIER),
        k_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        v_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for place in gl.static_range(Q_SLOTS):
        mbarrier.init(shared.q_ready.index(place), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(shared.k_ready.index(slot), count=1)
        mbarrier.init(shared.v_ready.index(slot), count=1)
        mbarrier.init(shared.free.index(slot), count=CONSUMERS)

    inputs = Inputs(q_desc, k_desc, v_desc)
    outputs = Outputs(o_ptr, lse_ptr, stride_ob, stride_oh, stride_os, num_heads, lse_len)
    line, program = place_in_order(heads_at_once)
    number = line % num_heads
    # Tiles of the longest sequence: those beyond a shorter one's end are empty.
    num_tiles = gl.cdiv(q_len, CONSUMERS * ROWS)
    head = Head(number, number // group_size, num_tiles, program, gl.num_programs(0))
    seq = sequence(cu_seqlens_q, cu_seqlens_k, line // num_heads, q_len, kv_len, PACKED)
    edges = Edges(window, prefix_len, shift)
    if MASK == "plain":
        # Else the warps would be handed numbers that they do not use.
        edges = Edges(0, 0, 0)
    # A tuple with a name would no longer hold constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL, MASK,
                           SOFTCAP)),
                (consume, (1, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL, MASK,
                           SOFTCAP)),
                (produce, (inputs, shared, head, seq, edges, CONSUMERS, TILES, Q_SLOTS, STAGES,
                           BLOCK_K, CAUSAL, MASK)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL, MASK,
                           SOFTCAP)),
                (consume, (1, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL, MASK,
                           SOFTCAP)),
                (consume, (2, shared, head, seq, edges, outputs, scale_log2, CONSUMERS, TILES,
                           Q_SLOTS, STAGES, BLOCK_K, HEAD_DIM, BLOCK_D, MAIN, TAIL, CAUSAL, MASK,
                           SOFTCAP)),
                (produce, (inputs, shared, head, seq, edges, CONSUMERS, TILES, Q_SLOTS, STAGES,
                           BLOCK_K, CAUSAL, MASK)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, 24],
        )  # fmt: skip
