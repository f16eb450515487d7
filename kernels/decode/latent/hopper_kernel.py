"""Absorbed latent attention for Hopper in Gluon: rank 512, a rotary part of 64, 16 bits.

What :mod:`kernels.decode.latent.kernel` does, where matmuls bind. Triton gives each of two
warpgroups all scores of a tile, which is half as many flops again; here one has the scores of
the even tiles and the other those of the odd ones, and each the output of one half of the
rank, as in DeepSeek's FlashMLA. Shared memory holds the queries, two tiles of latents (buffer
0 for even tiles, 1 for odd ones) and one tile of probabilities. Roles of the warps:

- A producer warp keeps the two buffers filled through TMA, as their parts are given back: of
  buffer c the rotary part, then half c (0: entries 0 to 255), then the other half. Each is one
  copy, with barriers of its own.
- Consumer c owns the tiles of buffer c and, of every tile, half c. For each tile j of its own:

  1. S_j = Q K_j^T is issued, part by part, in the order in which they come;
  2. the other's P_{j-1} and its running maximum are awaited, O is rescaled to the latter,
     and O += P_{j-1} V_{j-1} is issued;
  3. the softmax of S_j runs beside that matmul, from the other's maximum on: there is one
     sequence of maxima, handed to and fro; the rotary part is given back;
  4. half c of tile j - 1 is given back; P_j and the new maximum go to shared memory;
  5. O += P_j V_j, and half c of tile j is given back.

Consumers so take turns: while one computes a softmax, the other's matmuls run. The one tile of
probabilities needs no lock, since who writes it has read what it overwrites. Row sums stay
apart, each consumer's over its own tiles, and are exchanged at the end of a piece.
docs/kernels.md has a diagram of the warps over time, the budget of shared memory and registers, and
what else was tried and gained nothing.

Waiting tells only even from odd phases, so no barrier may complete two while one waits for it.
Every part's ``ready`` and ``free`` take turns: it is loaded anew only when it was given back,
which its last reader does: consumer c reads the other half of buffer c in step 1 only, before
it hands over the P_j without which the other does not read, nor give back, that half. ``p_ready``
of a consumer is awaited once for each tile of its, before the other hands over a P of its own,
without which the first does not get to the next. Nobody waits for what comes later in the order
of tiles: the producer waits for parts of tile j - 2 to load tile j, given back in the steps of
tiles j - 2 and j - 1, which only need tiles up to j - 1. Pieces follow each other through
``q_free`` and ``totals_ready``, which both consumers pass. So nothing stands still.

Tokens behind a sequence's length may be anything: their scores are masked, and before the last
tile's values are multiplied each consumer overwrites their rows of its half with zeros.

The schedule and the slots of pieces are those of the other kernels. Pieces are merged by
:mod:`kernels.decode.latent.merge_kernel`, a second launch: registers and shared memory are full.
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

from kernels.flash.hopper.tiles import opaque

ROWS: gl.constexpr = gl.constexpr(64)
"""Queries of a program, and tokens of a tile."""

HALF: gl.constexpr = gl.constexpr(256)
"""Entries of a latent that one consumer accumulates."""

ROPE: gl.constexpr = gl.constexpr(64)
RANK: gl.constexpr = gl.constexpr(512)


@gluon.jit
def add(a, b):
    return a + b


class Inputs(NamedTuple):
    """Descriptors of the tensors that TMA copies from."""

    q: Any
    q_rope: Any
    cache: Any
    rope: Any
    """The cache again, for copies of its rotary part."""


class Shared(NamedTuple):
    """A program's shared memory: queries, probabilities, two tiles of latents; then barriers."""

    q_halves: Any
    q_rope: Any
    p_tile: Any
    halves: Any
    """Half h of buffer b is number 2 b + h."""
    ropes: Any
    maxima: Any
    """Running maximum of each consumer's last tile."""
    totals: Any
    """Row sums of both consumers, for pieces in turn."""
    q_ready: Any
    q_free: Any
    ready: Any
    """One for each half."""
    free: Any
    rope_ready: Any
    rope_free: Any
    p_ready: Any
    totals_ready: Any


class Cache(NamedTuple):
    """Lengths of the sequences, and the block table."""

    lengths_ptr: Any
    table_ptr: Any
    table_stride: Any
    max_len: Any


class Outputs(NamedTuple):
    """Destinations of whole lines, and of pieces of lines."""

    out_ptr: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any
    pieces_ptr: Any
    piece_lse_ptr: Any
    piece_slot: Any
    """Slot of this program's first piece; its last one has the next."""


class Share(NamedTuple):
    """The tiles of one program: units ``unit`` to ``stop`` of all lines, one after another."""

    num_rows: Any
    """Queries of a sequence: its heads, times its new tokens."""
    row_tile: Any
    """The number of this program's 64 queries among them."""
    unit: Any
    stop: Any
    sequence: Any
    """The line that ``unit`` lies in."""
    before: Any
    """Units of all lines before that."""


class Tile(NamedTuple):
    """One tile of a line."""

    number: Any
    """Place in the line."""
    turn: Any
    """Place among the tiles of the program."""
    length: Any
    """Tokens of the line."""
    num_seen: Any
    """Tokens that each query sees."""


class Progress(NamedTuple):
    """Values that a consumer carries from one of its tiles to the next."""

    o: Any
    m_o: Any
    """The maximum that o is relative to, in the layout of its rows."""
    m_sum: Any
    """The maximum that total is relative to, in the layout of the scores' rows."""
    total: Any


@gluon.jit
def line_at(lengths_ptr, sequence, unit, before, stop):
    """Tokens and units of the line that ``unit`` lies in, and the share's first and end tile."""
    length = gl.load(lengths_ptr + sequence)
    units = gl.maximum(gl.cdiv(length, ROWS), 1)
    return length, units, unit - before, gl.minimum(units, stop - before)


@gluon.jit
def row_of(tile, sequence, cache, PAGE: gl.constexpr):
    """First row of a tile in the cache, seen as [tokens, 576]."""
    if PAGE == 0:
        row = sequence * cache.max_len + tile * ROWS
    else:
        position = tile * ROWS
        block = gl.load(cache.table_ptr + sequence * cache.table_stride + position // PAGE)
        row = block * PAGE + position % PAGE
    return row


@gluon.jit
def load_half(cache_desc, shared, row, buffer, half, phase):
    """Fills half ``half`` of a buffer, once it is given back."""
    number = 2 * buffer + half
    mbarrier.wait(shared.free.index(number), phase)
    mbarrier.expect(shared.ready.index(number), cache_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        cache_desc, [row, half * HALF], shared.ready.index(number), shared.halves.index(number)
    )


@gluon.jit
def produce(inputs, shared, cache, share, PAGE: gl.constexpr):
    """The producer: queries of each piece, and its tiles, part by part."""
    num_rows, row_tile, unit, stop, sequence, before = share
    q_nbytes: gl.constexpr = 2 * inputs.q.block_type.nbytes + inputs.q_rope.block_type.nbytes
    count = 0
    # Everything starts free: waiting for the phase before the first one returns at once.
    q_phase = 1
    while unit < stop:
        _, units, first, last = line_at(cache.lengths_ptr, sequence, unit, before, stop)
        mbarrier.wait(shared.q_free, q_phase)
        q_phase ^= 1
        q_ready = shared.q_ready
        mbarrier.expect(q_ready, q_nbytes)
        q_row = sequence * num_rows + row_tile * ROWS
        tma.async_copy_global_to_shared(inputs.q, [q_row, 0], q_ready, shared.q_halves.index(0))
        tma.async_copy_global_to_shared(inputs.q, [q_row, HALF], q_ready, shared.q_halves.index(1))
        tma.async_copy_global_to_shared(inputs.q_rope, [q_row, 0], q_ready, shared.q_rope.index(0))
        for tile in range(first, last):
            row = row_of(tile, sequence, cache, PAGE)
            buffer = count & 1
            phase = ((count >> 1) & 1) ^ 1
            mbarrier.wait(shared.rope_free.index(buffer), phase)
            rope_ready = shared.rope_ready.index(buffer)
            mbarrier.expect(rope_ready, inputs.rope.block_type.nbytes)
            tma.async_copy_global_to_shared(
                inputs.rope, [row, RANK], rope_ready, shared.ropes.index(buffer)
            )
            load_half(inputs.cache, shared, row, buffer, buffer, phase)
            load_half(inputs.cache, shared, row, buffer, 1 - buffer, phase)
            count += 1
        unit = before + last
        if last == units:
            sequence += 1
            before = unit


@gluon.jit
def finite(m):
    """A running maximum to subtract: minus infinity less itself is not a number."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def rescaled(o, m_o, m):
    """o relative to the new maximum ``m`` [ROWS] in place of ``m_o``."""
    return o * gl.exp2(m_o - finite(m))[:, None]


@gluon.jit
def clear_tail(halves, half, num_tokens):
    """Zeros in the rows from ``num_tokens`` on of one half tile, 64 columns at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    parts = halves._reinterpret(halves.dtype, [16, ROWS, 64], halves.type.layout)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    for part in range(4):
        place = parts.index(half * 4 + part)
        x = place.load(LAYOUT)
        place.store(gl.where(row[:, None] < num_tokens, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def add_scores(shared, s, me, zero, phase, OF: gl.constexpr):
    """Issues S += Q K^T over half ``OF`` of buffer ``me``, once that has arrived."""
    half = 2 * me + OF
    mbarrier.wait(shared.ready.index(half), phase)
    return warpgroup_mma(
        shared.q_halves.index(zero + OF),
        shared.halves.index(half).permute((1, 0)),
        s,
        is_async=True,
    )


@gluon.jit
def masked(s, tile, scale_log2, NEW: gl.constexpr):
    """Scores in units of log2; minus infinity for what a query does not see."""
    s = s * scale_log2
    if (tile.number + 1) * ROWS > tile.length - (NEW - 1):
        key = tile.number * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
        s = gl.where(key[None, :] < tile.num_seen[:, None], s, float("-inf"))
    return s


@gluon.jit
def own_tile(
    shared,
    before,
    tile,
    scale_log2,
    CONSUMER: gl.constexpr,
    FOLLOWS: gl.constexpr,
    NEW: gl.constexpr,
):
    """Steps 1 to 5 for a tile of this consumer's; FOLLOWS: the piece has one before it."""
    o, m_o, m_sum, total = before
    OTHER: gl.constexpr = 1 - CONSUMER
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_LAYOUT: gl.constexpr = o.type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    phase = (tile.turn >> 1) & 1
    earlier = ((tile.turn - 1) >> 1) & 1
    me = opaque(CONSUMER)
    zero = me - CONSUMER
    own_half = 3 * me
    others_half = 2 * (zero + OTHER) + me
    mbarrier.wait(shared.rope_ready.index(me), phase)
    s = warpgroup_mma(
        shared.q_rope.index(zero), shared.ropes.index(me).permute((1, 0)),
        gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT), use_acc=False, is_async=True,
    )  # fmt: skip
    s = add_scores(shared, s, me, zero, phase, CONSUMER)
    if FOLLOWS:
        # The other has seen it arrive; who reads it must have seen so itself.
        mbarrier.wait(shared.ready.index(others_half), earlier)
    s = add_scores(shared, s, me, zero, phase, OTHER)
    if FOLLOWS:
        mbarrier.wait(shared.p_ready.index(zero + OTHER), earlier)
        m_new_o = shared.maxima.index(zero + OTHER).load(O_ROW)
        o = rescaled(o, m_o, m_new_o)
        m_o = m_new_o
        o = warpgroup_mma(
            shared.p_tile.index(zero), shared.halves.index(others_half), o, is_async=True
        )
        s = warpgroup_mma_wait(1, deps=[s])
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(shared.rope_free.index(me))
    s = masked(s, tile, scale_log2, NEW)
    m = gl.max(s, axis=1)
    if FOLLOWS:
        m = gl.maximum(m, shared.maxima.index(zero + OTHER).load(ROW))
    reference = finite(m)
    p = gl.exp2(s - reference[:, None])
    total = total * gl.exp2(m_sum - reference) + gl.sum(p, axis=1)
    p = p.to(shared.halves.dtype)
    if FOLLOWS:
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(shared.free.index(others_half))
    shared.p_tile.index(zero).store(p)
    shared.maxima.index(me).store(m)
    fence_async_shared()
    mbarrier.arrive(shared.p_ready.index(me))
    m_new_o = gl.convert_layout(m, O_ROW)
    o = rescaled(o, m_o, m_new_o)
    if (tile.number + 1) * ROWS > tile.length:
        clear_tail(shared.halves, own_half, tile.length - tile.number * ROWS)
    o = warpgroup_mma(
        gl.convert_layout(p, P_LAYOUT), shared.halves.index(own_half), o, is_async=True
    )
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(shared.free.index(own_half))
    return Progress(o, m_new_o, m, total)


@gluon.jit
def consume(
    shared, lengths_ptr, outputs, share, scale_log2, CONSUMER: gl.constexpr, NEW: gl.constexpr
):
    """One consumer: scores of every other tile, one half of the output."""
    num_rows, row_tile, unit, stop, sequence, before = share
    OTHER: gl.constexpr = 1 - CONSUMER
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    token = (row_tile * ROWS + gl.arange(0, ROWS, ROW)) % NEW
    row = row_tile * ROWS + gl.arange(0, ROWS, O_ROW)
    column = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, O_LAYOUT))
    inside = row < num_rows
    count = 0
    piece = 0
    while unit < stop:
        length, units, first, last = line_at(lengths_ptr, sequence, unit, before, stop)
        num_seen = gl.minimum(length - (NEW - 1) + token, length)
        o = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
        m_o = gl.full([ROWS], float("-inf"), gl.float32, O_ROW)
        m_sum = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([ROWS], gl.float32, ROW)
        mbarrier.wait(shared.q_ready, piece & 1)
        # Tiles of this share are counted through, and tile n lies in buffer n mod 2.
        number = first
        progress = Progress(o, m_o, m_sum, total)
        if count & 1 == CONSUMER:
            tile = Tile(number, count, length, num_seen)
            progress = own_tile(shared, progress, tile, scale_log2, CONSUMER, False, NEW)
            number += 1
        number += 1
        while number < last:
            tile = Tile(number, count + number - first, length, num_seen)
            progress = own_tile(shared, progress, tile, scale_log2, CONSUMER, True, NEW)
            number += 2
        o, m_o, m_sum, total = progress
        mbarrier.arrive(shared.q_free)
        count += last - first
        if (count - 1) & 1 == OTHER:
            earlier = ((count - 1) >> 1) & 1
            mbarrier.wait(shared.ready.index(2 * OTHER + CONSUMER), earlier)
            mbarrier.wait(shared.p_ready.index(OTHER), earlier)
            m_new_o = shared.maxima.index(OTHER).load(O_ROW)
            o = rescaled(o, m_o, m_new_o)
            m_o = m_new_o
            if last * ROWS > length:
                clear_tail(shared.halves, 2 * OTHER + CONSUMER, length - (last - 1) * ROWS)
            o = warpgroup_mma(
                shared.p_tile.index(0), shared.halves.index(2 * OTHER + CONSUMER), o, is_async=True
            )
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(shared.free.index(2 * OTHER + CONSUMER))

        # Row sums of both, relative to the last maximum. Slots and barriers alternate with the
        # pieces: a consumer may be done with the next one, if it is short, before the other
        # has looked.
        turn = (piece & 1) * 2
        m_last = gl.convert_layout(m_o, ROW)
        shared.totals.index(turn + CONSUMER).store(total * gl.exp2(m_sum - finite(m_last)))
        mbarrier.arrive(shared.totals_ready.index(turn + CONSUMER))
        mbarrier.wait(shared.totals_ready.index(turn + OTHER), (piece >> 1) & 1)
        both = shared.totals.index(turn).load(O_ROW) + shared.totals.index(turn + 1).load(O_ROW)
        safe = gl.where(both == 0.0, 1.0, both)
        o = o * (1.0 / safe)[:, None]
        if (first == 0) & (last == units):
            places = (
                sequence.to(gl.int64) * outputs.stride_b
                + (row // NEW) * outputs.stride_h + (row % NEW) * outputs.stride_t
            )  # fmt: skip
            gl.store(
                outputs.out_ptr + places[:, None] + column[None, :],
                o.to(outputs.out_ptr.dtype.element_ty),
                mask=inside[:, None],
            )
        else:
            slot = outputs.piece_slot + gl.where(first > 0, 0, 1)
            tile_row = row - row_tile * ROWS
            places = (slot.to(gl.int64) * ROWS + tile_row) * RANK
            gl.store(
                outputs.pieces_ptr + places[:, None] + column[None, :], o, mask=inside[:, None]
            )
            if CONSUMER == 0:
                lse = gl.where(both == 0.0, float("-inf"), m_o + gl.log2(safe))
                gl.store(
                    outputs.piece_lse_ptr + slot.to(gl.int64) * ROWS + tile_row, lse, mask=inside
                )
        piece += 1
        unit = before + last
        if last == units:
            sequence += 1
            before = unit


@gluon.jit(do_not_specialize=["batch_size", "num_workers", "min_units", "max_len"])
def hopper_latent_kernel(
    q_desc,
    q_rope_desc,
    cache_desc,
    rope_desc,
    lengths_ptr,
    table_ptr,
    out_ptr,
    pieces_ptr,
    out_stride_b,
    out_stride_h,
    out_stride_t,
    table_stride,
    max_len,
    num_rows,
    batch_size,
    num_workers,
    min_units,
    scale_log2,
    NEW: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_B: gl.constexpr,
    ROW_TILES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Output, or pieces of it, of one worker's share; grid: num_workers * ROW_TILES.

    Queries come as [B * num_rows, 512] and [B * num_rows, 64], the cache as [tokens, 576].
    """
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        q_halves=gl.allocate_shared_memory(dtype, [2, ROWS, HALF], TILE),
        p_tile=gl.allocate_shared_memory(dtype, [1, ROWS, ROWS], TILE),
        q_rope=gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], TILE),
        halves=gl.allocate_shared_memory(dtype, [4, ROWS, HALF], TILE),
        ropes=gl.allocate_shared_memory(dtype, [2, ROWS, ROPE], TILE),
        maxima=gl.allocate_shared_memory(gl.float32, [2, ROWS], LINE),
        totals=gl.allocate_shared_memory(gl.float32, [4, ROWS], LINE),
        q_ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        q_free=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        ready=gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        rope_ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        rope_free=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        p_ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        totals_ready=gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
    )
    mbarrier.init(shared.q_ready, count=1)
    mbarrier.init(shared.q_free, count=2)
    for i in gl.static_range(4):
        mbarrier.init(shared.ready.index(i), count=1)
        mbarrier.init(shared.free.index(i), count=1)
        mbarrier.init(shared.totals_ready.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(shared.rope_ready.index(i), count=1)
        mbarrier.init(shared.rope_free.index(i), count=1)
        mbarrier.init(shared.p_ready.index(i), count=1)

    # As kernels.decode.schedule.share_of, with layouts.
    worker = gl.program_id(0) // ROW_TILES
    row_tile = gl.program_id(0) % ROW_TILES
    SEQUENCES: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    sequences = gl.arange(0, BLOCK_B, SEQUENCES)
    known = sequences < batch_size
    lengths = gl.load(lengths_ptr + sequences, mask=known, other=0)
    units = gl.where(known, gl.maximum((lengths + (ROWS - 1)) // ROWS, 1), 0)
    ends = gl.associative_scan(units, 0, add)
    total = gl.sum(units, axis=0)
    num_workers = gl.minimum(num_workers, gl.maximum(total // min_units, 1))
    start = (worker.to(gl.int64) * total // num_workers).to(gl.int32)
    stop = ((worker.to(gl.int64) + 1) * total // num_workers).to(gl.int32)
    stop = gl.where(worker < num_workers, stop, start)
    passed = ends <= start
    sequence = gl.sum(gl.where(passed & known, 1, 0), axis=0)
    before = gl.sum(gl.where(passed, units, 0), axis=0)

    piece_lse_ptr = pieces_ptr + gl.num_programs(0).to(gl.int64) * (2 * ROWS * RANK)
    inputs = Inputs(q=q_desc, q_rope=q_rope_desc, cache=cache_desc, rope=rope_desc)
    cache = Cache(lengths_ptr, table_ptr, table_stride, max_len)
    outputs = Outputs(
        out_ptr=out_ptr,
        stride_b=out_stride_b,
        stride_h=out_stride_h,
        stride_t=out_stride_t,
        pieces_ptr=pieces_ptr,
        piece_lse_ptr=piece_lse_ptr,
        piece_slot=gl.program_id(0) * 2,
    )
    share = Share(
        num_rows=num_rows,
        row_tile=row_tile,
        unit=start,
        stop=stop,
        sequence=sequence,
        before=before,
    )
    gl.warp_specialize(
        [
            (consume, (shared, lengths_ptr, outputs, share, scale_log2, 0, NEW)),
            (consume, (shared, lengths_ptr, outputs, share, scale_log2, 1, NEW)),
            (produce, (inputs, shared, cache, share, PAGE)),
        ],
        [4, 1],
        [240, 24],
    )
