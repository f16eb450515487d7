"""dK and dV of a tile of keys whose query heads, or whose queries, several programs share.

The programs add what they have to float32 sums in memory, in the order in which they start: band by
band and in each by query heads, or head by head and of each by sections. The last one adds what it
has itself and writes the result. Where heads take turns (backward_schedule.heads_at_once) the
programs of a group start one after another, and L2 still holds the sums; of longer sequences they
go to memory and back, beside programs that take much longer.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.flash.hopper.backward_order import add_tile, by_thread
from kernels.flash.hopper.tiles import ROWS, store_rows


class Sharing(NamedTuple):
    """Where the programs that share a tile of keys meet, and this one's place among them."""

    adds: Any
    """Whether it adds to the sums, as all but the last do."""
    ends: Any
    """Whether it is the last."""
    before: Any
    """Programs that add before this one."""
    count: Any
    """Address of the number of programs that have added."""
    sums: Any
    """Address of this tile's sums."""


@gluon.jit
def sharing_of(
    key_sums,
    key_counts,
    padded_keys,
    heads,
    group_size,
    first_key,
    seq,
    band,
    num_bands,
    COLUMNS: gl.constexpr,
    ORDER: gl.constexpr,
):
    """The place of a program among those of its tile, in the order in which they start.

    Args:
        key_sums: [key heads of the batch, padded_keys / 64, 64 * COLUMNS] float32: dk of 64 keys,
            and then dv, in the order of ``by_thread``.
        key_counts: [key heads of the batch, padded_keys / 64] int32, zero at the start.
        COLUMNS: of dk and dv together, padded.
    """
    num_programs = group_size // heads.num_members
    before = heads.first_head % group_size // heads.num_members
    if ORDER == "sections":
        before = before * num_bands + band
    else:
        before += band * num_programs
    num_programs *= num_bands
    line = seq.batch * (heads.num_heads // group_size) + heads.kv_head
    row = line.to(gl.int64) * padded_keys + seq.key_line_start + first_key
    return Sharing(
        adds=before < num_programs - 1,
        ends=before == num_programs - 1,
        before=before,
        count=key_counts + row // ROWS,
        sums=key_sums + row * COLUMNS,
    )


@gluon.jit
def with_sums(x, pointer, before, DIVIDED: gl.constexpr):
    """A tile [64, N] and the sums of the programs before, whose additions have been acquired.

    Some tiles have one band, and nobody ``before`` it has written sums.
    """
    own = by_thread(x)
    LAYOUT: gl.constexpr = own.type.layout
    N: gl.constexpr = x.shape[1]
    places = pointer + gl.arange(0, own.shape[0], LAYOUT)
    # From L2: L1 can hold what an earlier program on this multiprocessor stored there.
    if DIVIDED:
        sums = gl.load(places, mask=before > 0, other=0.0, cache_modifier=".cg") + own
    else:
        sums = gl.load(places, cache_modifier=".cg") + own
    # The way back from by_thread.
    tile = sums.reshape([N // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, N])
    return gl.convert_layout(tile, x.type.layout, assert_trivial=True)


@gluon.jit
def give(
    x,
    rows,
    first,
    sharing,
    OFFSET: gl.constexpr,
    FIRST_COLUMN: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    SHARED: gl.constexpr,
    REARRANGE: gl.constexpr = True,
    DIVIDED: gl.constexpr = False,
):
    """A tile of dk or dv [64, N] to memory: as it is, or where programs share it, in order.

    Args:
        OFFSET: of its sums, in numbers.
    """
    if SHARED:
        sums = sharing.sums + OFFSET
        if sharing.adds:
            add_tile(sums, x, sharing.before == 0)
        if sharing.ends:
            whole = with_sums(x, sums, sharing.before, DIVIDED)
            store_rows(whole, rows, first, FIRST_COLUMN, HEAD_DIM, REARRANGE)
    else:
        store_rows(x, rows, first, FIRST_COLUMN, HEAD_DIM, REARRANGE)
