"""What the Hopper backward kernels share: their division of work, and the order of sums of dQ.

A program has ``SIZE`` keys of one key head and loops over the queries that see them, ``SIZE`` at a
time: a *turn*. dQ is summed over programs in memory, in float32, and always in the same order, so
that two runs of a call agree bit for bit. One warp waits for the programs before
(:func:`open_turns`), another tells the one after (:func:`close_turns`).

The program of the last keys is the first, and under a causal mask that order costs little: the
program of the keys before starts its loop one turn earlier, and so comes to each turn one turn
later. But the longest programs of a head are its last ones, and a GPU would empty on those of the
last heads. So under a causal mask these heads are *turned* (backward_schedule.heads_turned): the
program of the first keys is the first, and each goes from its last turn to its first. Programs that
start one after another then come to each turn one after another, too, and the last ones are the
shortest.

Where there are too few heads for both kinds, each is turned in part
(backward_schedule.keys_turned): the programs of its last keys start first, in the first order, and
those of its first keys follow, turned, as processors become free one after another. The two parts
add to sums of dQ of their own.

Where all programs could start at once, and the GPU would idle as the short ones end, the turns of a
tile of keys are divided among programs, its *bands* (backward_schedule.bands_of): each band of all
tiles has sums of dQ of its own, and the bands of one tile add up dK and dV
(:mod:`kernels.flash.hopper.backward_sharing`).

Where the queries of one head do not fit the L2 cache, they are divided into *sections*
(backward_schedule.sections_of): the programs of one section go through its queries alone, the last
keys first, and those of the next section follow. So each turn has programs of one section, and dQ
one order and one sum; the programs of one tile of keys add up dK and dV.

No order can block: programs start in the order of their indices, so whichever a program
waits for has started before it.

Under a mask each query sees one range of keys, whose ends never move to the left from query to
query (:class:`kernels.problem.Mask`). So the tiles of keys that come to a turn follow each other,
and both the turns of a tile and the programs before it at a turn follow from a few numbers
(:func:`turns_of_keys`, :func:`programs_before`). Under a window a program begins one turn before
that of the later keys and ends one before it, too.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from kernels.flash.hopper.tiles import (
    LOG2_E,
    ROWS,
    ZERO,
    Rows,
    capped,
    columns,
    hide,
    offsets,
    opaque,
    sequence,
    sequence_of_program,
)


class Inputs(NamedTuple):
    """Descriptors of the tensors that TMA copies from."""

    q: Any
    do: Any
    k: Any
    v: Any
    statistics: Any
    """Two lines for each query head: lse in units of log2, and minus delta num_lines further on."""


class Heads(NamedTuple):
    """The query heads of a program, which share a key head."""

    num_heads: Any
    """Query heads of a sequence."""
    first_head: Any
    num_members: Any
    """Query heads of this program."""
    kv_head: Any
    num_lines: Any
    """Query heads of the whole batch."""
    padded_len: Any
    """Rows of a line of the statistics."""
    lines_before: Any
    """Lines of sums and counts of dQ before those that this program's part of the heads adds to."""


class Turns(NamedTuple):
    """The keys of a program, and the turns whose queries see some of them, in steps.

    A step is its turn, or minus its turn if the program is turned (:func:`turn_of`). Which of them
    need the mask, :func:`bounds_of_loops` says.
    """

    first_key: Any
    first: Any
    end: Any
    num_masked: Any
    """Steps that need the mask for their last keys: the first, or if turned the last."""
    unmasked_end: Any
    """Where steps that need the mask begin behind those that do not; the end if there are none."""
    is_turned: Any
    """1, or 0: as a bit it would leave what kernels keep behind it in shared memory unaligned."""
    key_tile: Any
    num_key_tiles: Any
    offset: Any
    """The last key that the first query sees, of a sequence that begins before and has no end."""
    start: Any
    """Under a window the first key that it sees, of the same sequence."""
    prefix_len: Any
    """Keys that every query sees, under the mask ``prefix``."""
    skipped: Any
    """Turns of the bands before this one."""


class Gradients(NamedTuple):
    """Destinations of dk and dv, with their strides."""

    dk_ptr: Any
    dv_ptr: Any
    stride_kb: Any
    stride_kh: Any
    stride_ks: Any
    stride_vb: Any
    stride_vh: Any
    stride_vs: Any


@gluon.jit
def rows_of_gradients(gradients, seq, heads):
    """Where dk and dv of the program's key head go."""
    dk_rows = Rows(
        pointer=gradients.dk_ptr,
        stride_b=gradients.stride_kb,
        stride_h=gradients.stride_kh,
        stride_s=gradients.stride_ks,
        batch=seq.batch,
        head=heads.kv_head,
        start=seq.k_start,
        length=seq.kv_len,
    )
    dv_rows = Rows(
        pointer=gradients.dv_ptr,
        stride_b=gradients.stride_vb,
        stride_h=gradients.stride_vh,
        stride_s=gradients.stride_vs,
        batch=seq.batch,
        head=heads.kv_head,
        start=seq.k_start,
        length=seq.kv_len,
    )
    return dk_rows, dv_rows


class Program(NamedTuple):
    """What one program has."""

    seq: Any
    heads: Any
    key_tile: Any
    """Behind the sequence's last one if the program has nothing to do."""
    is_turned: Any
    part: Any
    """Its band, or its section; 0 where turns are not divided."""


@gluon.jit
def place_in_order(
    index,
    num_heads,
    heads_behind,
    heads_at_once,
    num_turned,
    num_key_tiles,
    ORDER: gl.constexpr,
):
    """The head and the key tile of program ``index``, and whether it is turned.

    Programs start in order, and of one head the last keys have to be added to dQ first. So many
    heads take turns, which leaves the long programs of all of them, not of one head alone, for the
    end; and where all programs are as long, they meet at a turn's dQ later. Where ``ORDER`` is
    "heads", the last ``num_turned`` heads, one of these groups or more, go by the first keys first;
    where it is "keys", all heads do in their first ``num_turned`` tiles of keys, after the others.

    Args:
        num_heads: to which the programs belong; ``heads_behind`` more follow, and are counted among
            the last ones.
    """
    first_head = index // (heads_at_once * num_key_tiles) * heads_at_once
    width = gl.minimum(heads_at_once, num_heads - first_head)
    index -= first_head * num_key_tiles
    key_tile = num_key_tiles - 1 - index // width
    is_turned = 0
    if ORDER == "heads":
        is_turned = gl.where(first_head >= num_heads + heads_behind - num_turned, 1, 0)
        key_tile = gl.where(is_turned > 0, index // width, key_tile)
    if ORDER == "keys":
        turned_tile = index // width - (num_key_tiles - num_turned)
        is_turned = gl.where(turned_tile >= 0, 1, 0)
        key_tile = gl.where(is_turned > 0, turned_tile, key_tile)
    return first_head + index % width, key_tile, is_turned


@gluon.jit
def place_in_batch(
    cu_seqlens_k,
    batch_size,
    num_heads,
    heads_at_once,
    num_turned,
    kv_len,
    SIZE: gl.constexpr,
    ORDER: gl.constexpr,
    PACKED: gl.constexpr,
):
    """The sequence, the head, and the key tile of this program, and whether it is turned.

    Args:
        num_heads: of a sequence, each with programs of its own.

    Returns:
        These four. A program whose key tile lies behind the sequence's last one has nothing to do.
    """
    index = gl.program_id(0)
    num_key_tiles = gl.cdiv(kv_len, SIZE)
    # Where heads are turned in part, those of all sequences take turns, and there are few programs.
    if PACKED and ORDER != "keys":
        seq, index, num_key_tiles, is_spare = sequence_of_program(
            cu_seqlens_k, batch_size, num_heads, index, SIZE
        )
        heads_behind = (batch_size - 1 - seq) * num_heads
        head, key_tile, is_turned = place_in_order(
            index, num_heads, heads_behind, heads_at_once, num_turned, num_key_tiles, ORDER
        )
        key_tile = gl.where(is_spare, num_key_tiles, key_tile)
    else:
        num_lines = gl.num_programs(0) // num_key_tiles
        line, key_tile, is_turned = place_in_order(
            index, num_lines, 0, heads_at_once, num_turned, num_key_tiles, ORDER
        )
        seq = line // num_heads
        head = line % num_heads
    return seq, head, key_tile, is_turned


@gluon.jit
def place_in_bands(num_heads, band_turns, num_key_tiles, ORDER: gl.constexpr):
    """The head, the key tile and the band of this program, and whether it is turned.

    A band that begins so many turns behind a tile's first one has so many tiles less, the last
    ones. In each the last keys start first; of "halves" the second one is turned: its programs
    start as those of the first one end, the shortest of these first. Of "sections", counted from
    the last queries on, the next one has so many tiles less, too; but heads follow one another.
    """
    head = gl.program_id(0) % num_heads
    place = gl.program_id(0) // num_heads
    if ORDER == "sections":
        programs_of_head = gl.num_programs(0) // num_heads
        head = gl.program_id(0) // programs_of_head
        place = gl.program_id(0) % programs_of_head
    num_tiles = num_key_tiles
    band = 0
    while place >= num_tiles:
        place -= num_tiles
        num_tiles -= band_turns
        band += 1
    key_tile = num_tiles - 1 - place
    is_turned = 0
    if ORDER == "halves":
        is_turned = band
        key_tile = gl.where(is_turned > 0, place, key_tile)
    return head, key_tile, band, is_turned


@gluon.jit
def in_section(turns, section, section_turns):
    """The turns of one section, of all turns of a program.

    A plain causal mask hides keys in the first turn alone, and of as many queries as keys the last
    tile has but one turn.
    """
    stop = turns.end - section * section_turns
    start = gl.maximum(stop - section_turns, turns.first)
    return Turns(
        first_key=turns.first_key,
        first=start,
        end=stop,
        num_masked=gl.where(start > turns.first, 0, turns.num_masked),
        unmasked_end=stop,
        is_turned=0,
        key_tile=turns.key_tile,
        num_key_tiles=turns.num_key_tiles,
        offset=turns.offset,
        start=turns.start,
        prefix_len=turns.prefix_len,
        skipped=0,
    )


@gluon.jit
def in_band(turns, band, band_turns, is_turned):
    """The turns of one band, of all turns of a program that is not turned.

    A plain causal mask hides keys in the first turn alone, or in all of a tile that has but one.
    """
    first = turns.first + band * band_turns
    end = gl.minimum(first + band_turns, turns.end)
    last_step = gl.where(is_turned > 0, 1 - first, end)
    return Turns(
        first_key=turns.first_key,
        first=gl.where(is_turned > 0, 1 - end, first),
        end=last_step,
        num_masked=gl.where(band > 0, 0, turns.num_masked),
        unmasked_end=last_step,
        is_turned=is_turned,
        key_tile=turns.key_tile,
        num_key_tiles=turns.num_key_tiles,
        offset=turns.offset,
        start=turns.start,
        prefix_len=turns.prefix_len,
        skipped=band * band_turns,
    )


@gluon.jit
def lines_before(is_turned, band, num_lines, ORDER: gl.constexpr):
    """Of :class:`Heads`: each band has sums of its own, and where heads are turned in part, their
    last keys have the second ones."""
    lines = 0
    if ORDER == "bands" or ORDER == "halves":
        lines = band * num_lines
    if ORDER == "keys":
        lines = gl.where(is_turned > 0, 0, num_lines)
    return lines


@gluon.jit
def turn_of(step):
    """The turn of a program's step."""
    return gl.abs(step)


@gluon.jit
def tile_of(place, SIZE: gl.constexpr, PARTS: gl.constexpr):
    """The turn, and the tile of 64 queries, at a place in a program's order of parts of turns."""
    turn = turn_of(place >> (PARTS - 1))
    return turn, turn * (SIZE // ROWS) + (place & (PARTS - 1))


@gluon.jit
def turns_of_keys(
    key_tile,
    q_len,
    kv_len,
    edges,
    is_turned,
    SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
):
    """The turns of the program with one tile of keys; none if it lies behind the sequence.

    The keys that a query sees begin and end no further left than those of the query before. So
    the last query of a turn says whether its queries have come to the tile, the first one whether
    they have gone past it.
    """
    first = key_tile * SIZE
    num_key_tiles = gl.cdiv(kv_len, SIZE)
    num_turns = gl.cdiv(q_len, SIZE)
    offset, start = offsets(q_len, kv_len, edges, CAUSAL, MASK)
    last_key = first + SIZE - 1
    first_turn = 0
    num_masked = 0
    end = num_turns
    if MASK == "window":
        end = gl.minimum(gl.maximum(last_key - start + SIZE, 0) // SIZE, num_turns)
    if CAUSAL or MASK == "window":
        first_turn = gl.maximum(first - offset, 0) // SIZE
        first_unmasked = gl.cdiv(gl.maximum(last_key - offset, 0), SIZE)
        if MASK == "prefix":
            first_turn = gl.where(first < edges.prefix_len, 0, first_turn)
            first_unmasked = gl.where(last_key < edges.prefix_len, 0, first_unmasked)
        first_turn = gl.minimum(first_turn, end)
        num_masked = gl.maximum(gl.minimum(first_unmasked, end) - first_turn, 0)
    if first + SIZE > kv_len:
        num_masked = end - first_turn
    if first >= kv_len:
        first_turn = end
        num_masked = 0
    unmasked_end = end
    if MASK == "window":
        past = gl.minimum(gl.maximum(first + 1 - start, 0) // SIZE, end)
        unmasked_end = gl.maximum(past, first_turn + num_masked)
    return Turns(
        first_key=first,
        first=gl.where(is_turned > 0, 1 - end, first_turn),
        end=gl.where(is_turned > 0, 1 - first_turn, end),
        num_masked=num_masked,
        unmasked_end=gl.where(is_turned > 0, 1 - first_turn - num_masked, unmasked_end),
        is_turned=is_turned,
        key_tile=key_tile,
        num_key_tiles=num_key_tiles,
        offset=offset,
        start=start if MASK == "window" else 0,
        prefix_len=edges.prefix_len if MASK == "prefix" else 0,
        skipped=0,
    )


@gluon.jit
def program_of(
    cu_seqlens_q,
    cu_seqlens_k,
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
    SIZE: gl.constexpr,
    ORDER: gl.constexpr,
    PACKED: gl.constexpr,
):
    """This :class:`Program`, by its number; the parameters are those of backward.flash_backward."""
    programs_of_sequence = num_heads // num_members
    DIVIDED: gl.constexpr = ORDER == "bands" or ORDER == "halves" or ORDER == "sections"
    # Dense batches alone are divided (backward_schedule.division): in sections of packed ones
    # programs wait without end.
    gl.static_assert(not DIVIDED or not PACKED)
    part = 0
    if DIVIDED:
        line, key_tile, part, is_turned = place_in_bands(
            heads_at_once, order_count, gl.cdiv(kv_len, SIZE), ORDER
        )
        batch = line // programs_of_sequence
        head = line % programs_of_sequence
    else:
        batch, head, key_tile, is_turned = place_in_batch(
            cu_seqlens_k,
            batch_size,
            programs_of_sequence,
            heads_at_once,
            order_count,
            kv_len,
            SIZE,
            ORDER,
            PACKED,
        )
    first_head = head * num_members
    heads = Heads(
        num_heads=num_heads,
        first_head=first_head,
        num_members=num_members,
        kv_head=first_head // group_size,
        num_lines=num_lines,
        padded_len=padded_len,
        lines_before=lines_before(is_turned, part, num_lines, ORDER),
    )
    seq = sequence(cu_seqlens_q, cu_seqlens_k, batch, q_len, kv_len, PACKED)
    return Program(seq, heads, key_tile, is_turned, part)


@gluon.jit
def turns_of_program(
    program,
    edges,
    order_count,
    SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    ORDER: gl.constexpr,
):
    """The program's turns, and among how many programs those of its keys are divided."""
    DIVIDED: gl.constexpr = ORDER == "bands" or ORDER == "halves" or ORDER == "sections"
    turns = turns_of_keys(
        program.key_tile,
        program.seq.q_len,
        program.seq.kv_len,
        edges,
        0 if DIVIDED else program.is_turned,
        SIZE,
        CAUSAL,
        MASK,
    )
    num_parts = 1
    if DIVIDED:
        num_parts = gl.cdiv(turns.end - turns.first, order_count)
        if ORDER == "sections":
            turns = in_section(turns, program.part, order_count)
        else:
            turns = in_band(turns, program.part, order_count, program.is_turned)
    return turns, num_parts


@gluon.jit
def bounds_of_loops(turns, again, AGAIN: gl.constexpr, MASK: gl.constexpr):
    """Steps where a loop with the mask starts, where one without takes over, and where that ends.

    Where the last steps need the mask, too (``AGAIN``), both loops run twice, as a third one would
    be more code, which spills more registers. ``again`` counts them: bounds that are carried from
    the first time to the second are compiled wrongly, by Triton 3.6 and 3.7.
    """
    start = turns.first
    middle = turns.first + turns.num_masked
    stop = turns.unmasked_end
    if AGAIN:
        if MASK == "plain":
            middle = gl.where(turns.is_turned > 0, start, middle)
        start = gl.where(again > 0, stop, start)
        middle = gl.where(again > 0, turns.end, middle)
        stop = gl.where(again > 0, turns.end, stop)
    return start, middle, stop


@gluon.jit
def programs_before(turn, turns, SIZE: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr):
    """The number of programs that add to a turn's dQ before this one.

    They are of later keys, or of a turned program of earlier ones.
    """
    last = turns.num_key_tiles - 1
    if CAUSAL or MASK == "window":
        last_key = turn * SIZE + SIZE - 1 + turns.offset
        if MASK == "prefix":
            last_key = gl.maximum(last_key, turns.prefix_len - 1)
        last = gl.minimum(last, last_key // SIZE)
    # The last of the tiles that come to a turn does so in its first band.
    last -= turns.skipped
    return gl.where(turns.is_turned > 0, turns.key_tile, last - turns.key_tile)


@gluon.jit
def open_turns(
    counts,
    shared,
    heads,
    seq,
    turns,
    sharing,
    SIZE: gl.constexpr,
    PARTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SHARED: gl.constexpr,
):
    """The warp that lets the consumers add to dQ once all programs before have done so.

    A turn has two ``PARTS`` where its halves are opened apart (backward_schedule.halves_apart, and
    always in backward_narrow), else one.

    A barrier tells only even phases from odd ones, so nobody may fall two phases behind another.
    Hence a part opens when the consumers are done with the one before and the two before that are
    closed; ``done`` and ``closed`` are two barriers each, for parts in turn. Where programs share
    a group, their sums of dK and dV are one more part, the last.
    """
    part = 0
    for member in range(heads.num_members):
        line = heads.lines_before + seq.batch * heads.num_heads + heads.first_head + member
        of_line = counts + (line.to(gl.int64) * heads.padded_len + seq.line_start) // ROWS
        for place in range(turns.first * PARTS, turns.end * PARTS):
            turn, tile = tile_of(place, SIZE, PARTS)
            before = programs_before(turn, turns, SIZE, CAUSAL, MASK)
            wait_until_open(of_line + tile, before, shared, part)
            mbarrier.arrive(shared.opened)
            part += 1
    if SHARED:
        open_sums(shared, sharing, part)


@gluon.jit
def wait_until_open(count, before, shared, part):
    """Wait until so many programs have added, and until the consumers may hear of it."""
    # Without acquiring, which would empty the L1 cache, and with it what consumers have spilled, at
    # every look: nothing is read here but the count. L2 adds in the order in which additions reach
    # it, and those before were released before the count.
    while gl.load(count, volatile=True) < before:
        pass
    # The phases of parts -1 and -2 count as over at the start.
    mbarrier.wait(shared.done.index((part + 1) & 1), ((part + 3) >> 1) & 1)
    mbarrier.wait(shared.closed.index(part & 1), ((part + 2) >> 1) & 1)


@gluon.jit
def close_turns(
    counts,
    shared,
    heads,
    seq,
    turns,
    sharing,
    SIZE: gl.constexpr,
    PARTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SHARED: gl.constexpr,
):
    """The warp that lets the next program add once all of this one's additions are in memory.

    Apart from :func:`open_turns` because waiting for memory takes a third of a turn.
    """
    part = 0
    for member in range(heads.num_members):
        line = heads.lines_before + seq.batch * heads.num_heads + heads.first_head + member
        of_line = counts + (line.to(gl.int64) * heads.padded_len + seq.line_start) // ROWS
        for place in range(turns.first * PARTS, turns.end * PARTS):
            turn, tile = tile_of(place, SIZE, PARTS)
            before = programs_before(turn, turns, SIZE, CAUSAL, MASK)
            mbarrier.wait(shared.done.index(part & 1), (part >> 1) & 1)
            gl.atomic_xchg(of_line + tile, before + 1, sem="release", scope="gpu")
            mbarrier.arrive(shared.closed.index(part & 1))
            part += 1
    if SHARED:
        close_sums(shared, sharing, part)


@gluon.jit
def open_sums(shared, sharing, part):
    """Let the consumers at the sums of dK and dV once the programs before have added to them."""
    if sharing.adds | sharing.ends:
        wait_until_open(sharing.count, sharing.before, shared, part)
        if sharing.ends:
            # It reads what others have added. Nobody changes the count any more; of an addition of
            # 0, whose result is not used, Triton 3.6 and 3.7 leave nothing.
            gl.atomic_xchg(sharing.count, sharing.before, sem="acquire", scope="gpu")
        mbarrier.arrive(shared.opened)


@gluon.jit
def close_sums(shared, sharing, part):
    """Let the next program at the sums of dK and dV."""
    if sharing.adds:
        mbarrier.wait(shared.done.index(part & 1), (part >> 1) & 1)
        gl.atomic_xchg(sharing.count, sharing.before + 1, sem="release", scope="gpu")


@gluon.jit
def by_thread(x):
    """[64, N] in a wgmma accumulator's layout as [64 * N], what a thread holds in fours.

    Written in this order a warp's addition is 512 consecutive bytes; rows.finish_dq
    puts rows and columns in order again.
    """
    N: gl.constexpr = x.shape[1]
    return x.reshape([4, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * N])


@gluon.jit
def add_tile(pointer, tile, is_first):
    """Add a tile [64, N] to sums in memory; the first program to come writes them."""
    x = by_thread(tile)
    LAYOUT: gl.constexpr = x.type.layout
    places = pointer + gl.arange(0, x.shape[0], LAYOUT)
    if is_first:
        gl.store(places, x)
    else:
        gl.atomic_add(places, x, sem="relaxed", scope="gpu")


@gluon.jit
def number_of_thread(N: gl.constexpr):
    """The thread's number in its warpgroup, for :func:`add_tile_by_thread` of tiles [64, N]: [128].

    Opaque, because the compiler would read it again from its special register at every use, and
    that waits for all matmuls that the warp has started: 5% of a turn.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    x = by_thread(gl.zeros([ROWS, N], gl.float32, LAYOUT))
    x = x.reshape([x.shape[0] // 512, 128, 4])
    return opaque(gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout))))


@gluon.jit
def add_tile_by_thread(pointer, thread, tile, is_first):
    """:func:`add_tile` at addresses from the number of the thread, which keeps a register."""
    x = by_thread(tile)
    x = x.reshape([x.shape[0] // 512, 128, 4])
    LAYOUT: gl.constexpr = x.type.layout
    part = gl.arange(0, x.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    places = 512 * part[:, None, None] + number[None, None, :]
    places = pointer + 4 * thread[None, :, None] + places
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
    turns,
    kv_len,
    scale_log2,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
):
    """P^T [64 keys, 64 queries]; queries beyond the sequence have lse = inf, and so P = 0."""
    if SOFTCAP > 0.0:
        p = gl.exp2(capped(s, scale_log2, SOFTCAP) - lse[None, :])
    else:
        p = gl.exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        if CAUSAL or MASK == "window":
            first = key - (first_query + turns.offset)
            if MASK == "prefix":
                first = gl.where(key < turns.prefix_len, 0, first)
            first = gl.where(key < kv_len, first, ROWS)
            last = key - (first_query + turns.start)
            p = hide(p, first, last, True, MASK == "window", ZERO)
        else:
            p = gl.where((key < kv_len)[:, None], p, 0.0)
    return p


@gluon.jit
def slope_of_cap(p, lse, SOFTCAP: gl.constexpr):
    """1 - tanh^2, by which the gradient of a capped score reaches the score.

    lse and P [64 keys, 64 queries] in float32 have the tanh: to recompute it from them takes no
    registers for it, or for S, in between. Where P is 0 it is of no account, but finite: a minimum
    or maximum of a number and none is the number.
    """
    tanh = (gl.log2(p) + lse[None, :]) * (1.0 / (SOFTCAP * LOG2_E))
    tanh = gl.minimum(gl.maximum(tanh, -1.0), 1.0)
    return 1.0 - tanh * tanh


@gluon.jit
def start_scores(a, b_tile, x, use_acc: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """K Q^T or V dO^T over MAIN + TAIL columns, on its way, and with ``use_acc`` x + that.

    a is in registers or shared memory.
    """
    s = warpgroup_mma(
        columns(a, 0, MAIN),
        columns(b_tile, 0, MAIN).permute((1, 0)),
        x,
        use_acc=use_acc,
        is_async=True,
    )
    if TAIL > 0:
        s = warpgroup_mma(
            columns(a, MAIN, TAIL),
            columns(b_tile, MAIN, TAIL).permute((1, 0)),
            s,
            is_async=True,
        )
    return s
