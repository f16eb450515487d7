"""Building blocks of the Hopper kernels: rows of a sequence, key tiles that a query tile visits.

The kernels hand groups of values to their warps as named tuples, which Gluon compiles as it does
plain ones (docs/kernels.md says why not as aggregates).
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS: gl.constexpr = gl.constexpr(64)
"""Rows of one consumer warpgroup: the M of one wgmma instruction."""

PANEL_COLUMNS: gl.constexpr = gl.constexpr(64)
"""Columns of 16 bits that lie together in shared memory: the width of a swizzle."""

CONSUMERS: gl.constexpr = gl.constexpr(2)
"""Warpgroups of the backward kernel that compute, each on its own rows."""

PROGRAM_ROWS: gl.constexpr = gl.constexpr(128)
"""Rows of one program of the backward kernel: those of its consumers."""

CONSUMER_REGISTERS: gl.constexpr = gl.constexpr(240)
"""Registers of a consumer's thread; a producer's has 24, of 64 Ki a multiprocessor."""

CONSUMER_REGISTERS_OF_THREE: gl.constexpr = gl.constexpr(160)
"""As CONSUMER_REGISTERS, where a program has three consumers."""

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)


class Sequence(NamedTuple):
    """The rows of one sequence in the tensors."""

    batch: Any
    """Index in the batch dimension: 0 in a packed batch."""
    q_start: Any
    q_len: Any
    k_start: Any
    kv_len: Any
    line_start: Any
    """Start of its row statistics: a multiple of PROGRAM_ROWS, with room up to the next."""
    key_line_start: Any
    """Start of its sums of dk and dv, likewise."""


@gluon.jit
def sequence(cu_seqlens_q, cu_seqlens_k, batch, q_len, kv_len, PACKED: gl.constexpr):
    """The sequence that is number ``batch`` of the batch."""
    q_start = 0
    k_start = 0
    line_start = 0
    key_line_start = 0
    if PACKED:
        q_start = gl.load(cu_seqlens_q + batch)
        k_start = gl.load(cu_seqlens_k + batch)
        q_len = gl.load(cu_seqlens_q + batch + 1) - q_start
        kv_len = gl.load(cu_seqlens_k + batch + 1) - k_start
        line_start = (q_start + PROGRAM_ROWS * batch) // PROGRAM_ROWS * PROGRAM_ROWS
        key_line_start = (k_start + PROGRAM_ROWS * batch) // PROGRAM_ROWS * PROGRAM_ROWS
        batch = 0
    return Sequence(batch, q_start, q_len, k_start, kv_len, line_start, key_line_start)


@gluon.jit
def sequence_of_program(cu_seqlens, batch_size, num_heads, index, ROWS: gl.constexpr):
    """The sequence of program ``index`` of a packed batch, whose programs have ``ROWS`` rows each.

    A sequence has ``num_heads`` programs for each of its slots, of which the first is number
    cu_seqlens[s] // ROWS + s: room for all of its rows, though no lengths are added up. So a batch
    has as many programs as its rows need, and at most num_heads more for each sequence
    (plans.grid).

    Returns:
        The sequence; the program's number among those of the sequence; the number of programs that
        each of its heads has, at least one; and whether the program is none of these, and has
        nothing to do. Its number is 0 then, so that it can be divided by what there is.
    """
    slot = index // num_heads
    first = 0
    end = batch_size
    # Eight parts at a time, not two: loads wait for each other in fewer rounds.
    while end - first > 1:
        part = gl.cdiv(end - first, 8)
        parts_before = 0
        for number in gl.static_range(1, 8):
            place = gl.minimum(first + number * part, end)
            begins_before = gl.load(cu_seqlens + place) // ROWS + place <= slot
            parts_before += gl.where(begins_before & (place < end), 1, 0)
        first += parts_before * part
        end = gl.minimum(first + part, end)
    start = gl.load(cu_seqlens + first)
    num_programs = gl.cdiv(gl.load(cu_seqlens + first + 1) - start, ROWS)
    number = index - (start // ROWS + first) * num_heads
    # Before the first sequence, or behind this one.
    is_spare = (number < 0) | (number >= num_programs * num_heads)
    return first, gl.where(is_spare, 0, number), gl.maximum(num_programs, 1), is_spare


class Edges(NamedTuple):
    """Numbers of :class:`kernels.problem.Mask`; a kernel's constant MASK says which of them count.

    ``plain`` is a causal mask aligned to the bottom right, or none, and has no numbers; ``prefix``
    is a causal mask with ``prefix_len`` and ``shift``; ``window`` has ``window`` and ``shift``.
    """

    window: Any
    prefix_len: Any
    shift: Any


class KeyTiles(NamedTuple):
    """The key tiles that a tile of queries visits, and those of them that need no mask."""

    start: Any
    stop: Any
    """Not before ``start``, and the same if there are none."""
    unmasked_start: Any
    """From ``start`` to ``stop``."""
    unmasked_stop: Any
    """From ``unmasked_start`` to ``stop``."""


@gluon.jit
def offsets(q_len, kv_len, edges, CAUSAL: gl.constexpr, MASK: gl.constexpr):
    """What to add to a query's index for the last key that it sees, and under a window the first.

    A prefix, and the ends of the sequence, are left to the caller.
    """
    last = kv_len - q_len
    if MASK != "plain":
        last = last + edges.shift
    first = last
    if MASK == "window":
        first = last - edges.window + 1
        if not CAUSAL:
            last = last + edges.window - 1
    return last, first


@gluon.jit
def key_tiles(
    first,
    q_len,
    kv_len,
    edges,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
):
    """The key tiles that queries see of which the first is ``first``.

    Both ends of what a query sees move to the right from query to query, if at all. So the first
    query and the last one decide what all together see, and what each of them does.
    """
    visible = kv_len
    unmasked = kv_len
    to_last, to_first = offsets(q_len, kv_len, edges, CAUSAL, MASK)
    if CAUSAL or MASK == "window":
        visible = gl.minimum(first + BLOCK_Q, q_len) + to_last
        unmasked = first + 1 + to_last
        if MASK == "prefix":
            visible = gl.maximum(visible, edges.prefix_len)
            unmasked = gl.maximum(unmasked, edges.prefix_len)
        visible = gl.minimum(kv_len, visible)
        unmasked = gl.minimum(kv_len, unmasked)
    stop = gl.maximum(gl.cdiv(visible, BLOCK_K), 0)
    if first >= q_len:
        stop = 0
    start = 0
    unmasked_start = 0
    unmasked_stop = gl.minimum(gl.maximum(unmasked, 0) // BLOCK_K, stop)
    if MASK == "window":
        start = gl.minimum(gl.maximum(first + to_first, 0) // BLOCK_K, stop)
        last_start = gl.maximum(gl.minimum(first + BLOCK_Q, q_len) - 1 + to_first, 0)
        unmasked_start = gl.minimum(gl.maximum(gl.cdiv(last_start, BLOCK_K), start), stop)
        unmasked_stop = gl.maximum(unmasked_stop, unmasked_start)
    return KeyTiles(start, stop, unmasked_start, unmasked_stop)


@gluon.jit
def visible_keys(
    tile,
    first_row,
    q_len,
    kv_len,
    edges,
    BLOCK_K: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """The first and the last column of a tile of keys that 64 queries see, [ROWS] each.

    They may lie before or behind the tile. The first one is of account under a window alone.
    """
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    last = gl.full([ROWS], kv_len - 1, gl.int32, gl.SliceLayout(1, LAYOUT))
    to_last, to_first = offsets(q_len, kv_len, edges, CAUSAL, MASK)
    if CAUSAL or MASK == "window":
        own = row + to_last
        if MASK == "prefix":
            own = gl.maximum(own, edges.prefix_len - 1)
        last = gl.minimum(own, last)
    return row + to_first - tile * BLOCK_K, last - tile * BLOCK_K


MINUS_INFINITY: gl.constexpr = gl.constexpr("0fFF800000")
ZERO: gl.constexpr = gl.constexpr("0f00000000")
"""As PTX writes them."""


@gluon.jit
def hide(x, first, last, BEFORE: gl.constexpr, BEHIND: gl.constexpr, HIDDEN: gl.constexpr):
    """x [ROWS, N], in float32, with ``HIDDEN`` in columns before the first or behind the last one.

    A thread has columns 8 a + 2 b + c, of which b is its own and the others are constants. So a row
    is compared as it is seen from b: with constants, which take no registers. And as assembly: of
    64 comparisons in a thread LLVM makes a number of 64 bits, and takes these out again one by one,
    which took 210 of 790 instructions for a tile of 128 keys.

    Args:
        first: [ROWS], of account where ``BEFORE``.
        last: [ROWS], of account where ``BEHIND``.
    """
    N: gl.constexpr = x.shape[1]
    parts = x.reshape([ROWS, N // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    OF_A: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    OF_B: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    OF_C: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    a = gl.arange(0, N // 8, OF_A)[None, :, None, None]
    c = gl.arange(0, 2, OF_C)[None, None, None, :]
    own = 2 * gl.arange(0, 4, OF_B)[None, None, :, None]
    column = 8 * a + c
    if BEFORE:
        first = gl.convert_layout(first, OF_ROW)[:, None, None, None] - own
        parts = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, " + HIDDEN + ", $1, p;}",
            "=f,f,r,r",
            [parts, first, column],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    if BEHIND:
        last = gl.convert_layout(last, OF_ROW)[:, None, None, None] - own
        parts = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, " + HIDDEN + ", $1, p;}",
            "=f,f,r,r",
            [parts, last, column],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    return gl.convert_layout(parts.reshape([ROWS, N]), x.type.layout)


@gluon.jit
def capped(s, scale_log2, SOFTCAP: gl.constexpr):
    """softcap tanh(scale s / softcap) of products s, in units of log2.

    tanh x is 1 - 2 / (exp(2 x) + 1), which is exact to float32 beside 1, also where exp overflows.
    The hardware's own tanh is wrong by up to 2^-11, times the cap an error of 2% in P at 50.
    """
    LIMIT: gl.constexpr = SOFTCAP * LOG2_E
    power = gl.exp2(s * (scale_log2 * (2.0 / SOFTCAP)))
    return LIMIT - 2.0 * LIMIT / (power + 1.0)


@gluon.jit
def opaque(x):
    """x, hidden from the compiler's loop-invariant code motion.

    Else it computes everything that depends on a constant tile index, some forty 64-bit
    addresses of wgmma operands, ahead of the loop, and has to keep them in memory.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


class Rows(NamedTuple):
    """Rows of one head in a tensor of [batch, heads, seq, columns]."""

    pointer: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    batch: Any
    head: Any
    start: Any
    """First row of the sequence."""
    length: Any
    """Rows of the sequence."""


@gluon.jit
def columns(tile, FIRST: gl.constexpr, NUM: gl.constexpr):
    """``NUM`` columns of a tile in shared memory, from ``FIRST`` on."""
    if tile.shape[1] != NUM:
        tile = tile.slice(FIRST, NUM, dim=1)
    return tile


@gluon.jit
def store_rows(
    x,
    rows,
    first,
    FIRST_COLUMN: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    REARRANGE: gl.constexpr = True,
):
    """64 rows of a sequence to memory, from ``first`` on, without those beyond its length.

    16-bit rows are rearranged, if there is shared memory for it, so that a thread has 16 bytes; in
    32 bits the four threads that share a row have 32 bytes side by side as they are.

    Args:
        x: [ROWS, N] of the columns from ``FIRST_COLUMN`` on; those at HEAD_DIM and beyond are
            left out.
    """
    N: gl.constexpr = x.shape[1]
    AS_IT_IS: gl.constexpr = rows.pointer.dtype.element_ty == gl.float32 or not REARRANGE
    OWN: gl.constexpr = x.type.layout
    ROW_MAJOR: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    STORE: gl.constexpr = OWN if AS_IT_IS else ROW_MAJOR
    x = gl.convert_layout(x.to(rows.pointer.dtype.element_ty), STORE)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    column = FIRST_COLUMN + gl.arange(0, N, gl.SliceLayout(0, STORE))
    base = rows.batch.to(gl.int64) * rows.stride_b + rows.head.to(gl.int64) * rows.stride_h
    places = (rows.start + row).to(gl.int64) * rows.stride_s
    mask = row[:, None] < rows.length
    if FIRST_COLUMN + N > HEAD_DIM:
        mask = mask & (column[None, :] < HEAD_DIM)
    gl.store(rows.pointer + base + places[:, None] + column[None, :], x, mask=mask)
