"""What both forward kernels for Hopper share: order of programs, scores, online softmax, stores.

:mod:`kernels.flash.hopper.forward` and :mod:`kernels.flash.hopper.forward_small` differ in how
keys and values come, and in who waits for what; what they compute of a tile of 64 queries is here.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from kernels.flash.hopper.tiles import (
    LN_2,
    MINUS_INFINITY,
    PANEL_COLUMNS,
    ROWS,
    Rows,
    columns,
    hide,
    sequence_of_program,
    store_rows,
    visible_keys,
)


class Inputs(NamedTuple):
    """Descriptors of the tensors that TMA copies from."""

    q: Any
    k: Any
    v: Any


class Head(NamedTuple):
    """The query head of a program, and how many query tiles and programs it has."""

    head: Any
    kv_head: Any
    num_tiles: Any
    program: Any
    """Which of the head's programs this is."""
    num_programs: Any


class Outputs(NamedTuple):
    """Destinations: o [B, H, S, Dv] with its strides, and contiguous lse [B, H, lse_len]."""

    o_ptr: Any
    lse_ptr: Any
    stride_ob: Any
    stride_oh: Any
    stride_os: Any
    num_heads: Any
    lse_len: Any


@gluon.jit
def place_in_order(index, num_heads, num_programs, heads_at_once):
    """The head, of ``num_heads``, and the number among its ``num_programs``, of program ``index``.

    The hardware starts programs in order. Of ``heads_at_once`` heads the first program of each
    comes first, then the second of each: under a causal mask the longest, so that short ones are
    left for the end.
    """
    first_head = index // (heads_at_once * num_programs) * heads_at_once
    width = gl.minimum(heads_at_once, num_heads - first_head)
    place = index - first_head * num_programs
    return first_head + place % width, place // width


@gluon.jit
def place_in_batch(
    cu_seqlens_q, batch_size, num_heads, heads_at_once, ROWS: gl.constexpr, PACKED: gl.constexpr
):
    """The sequence, the head, and the number among the head's programs, of this program.

    Returns:
        These three, and the number of the head's programs of ``ROWS`` rows each. A program whose
        number is that or more has nothing to do.
    """
    num_programs = gl.num_programs(0)
    index = gl.program_id(1) * num_programs + gl.program_id(0)
    if PACKED:
        seq, index, num_programs, is_spare = sequence_of_program(
            cu_seqlens_q, batch_size, num_heads, index, ROWS
        )
        head, program = place_in_order(index, num_heads, num_programs, heads_at_once)
        program = gl.where(is_spare, num_programs, program)
    else:
        line, program = place_in_order(index, gl.num_programs(1), num_programs, heads_at_once)
        seq = line // num_heads
        head = line % num_heads
    return seq, head, program, num_programs


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
    first, last = visible_keys(
        tile, first_row, seq.q_len, seq.kv_len, edges, BLOCK_K, CAUSAL, MASK, LAYOUT
    )
    return hide(s, first, last, MASK == "window", True, MINUS_INFINITY)


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
def start_values(p, v_tile, o):
    """o + P V over the columns of o, on its way."""
    return warpgroup_mma(p, columns(v_tile, 0, o.shape[1]), o, is_async=True)


@gluon.jit
def panels_at(tiles, place, PANELS: gl.constexpr):
    """The three panels of the tile at ``place``, which lie in ``tiles`` one after another."""
    gl.static_assert(PANELS == 3)
    first = PANELS * place
    return tiles.index(first), tiles.index(first + 1), tiles.index(first + 2)


@gluon.jit
def start_scores(q_tile, k_tile, MAIN: gl.constexpr, TAIL: gl.constexpr, PANELS: gl.constexpr = 1):
    """S = Q K^T over MAIN + TAIL columns, on its way: one matmul, or two, or one for each panel."""
    if PANELS == 1:
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
    else:
        s = start_scores(q_tile[0], k_tile[0], PANEL_COLUMNS, 0)
        for panel in gl.static_range(1, PANELS):
            k_panel = k_tile[panel].permute((1, 0))
            s = warpgroup_mma(q_tile[panel], k_panel, s, is_async=True)
    return s


@gluon.jit
def finish(o, reference, total, first_row, head, seq, outputs, VALUE_DIM: gl.constexpr):
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
    store_rows(o, rows, first_row, 0, VALUE_DIM)
