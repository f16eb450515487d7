"""FlashAttention forward for Hopper in small programs, several of which share a multiprocessor.

A program of :mod:`kernels.flash.hopper.forward` takes all registers of a multiprocessor, so that
nothing runs beside its set-up, its first copies and its stores. Here a program has one tile of 64
queries and one warpgroup, which starts its copies itself. What one program waits for, the others on
the multiprocessor hide: where tiles are few, that takes less time. :mod:`program_size` says where.

The order within a program is that of the other kernel: S_j = Q K_j^T and O += P_{j+1} V_{j+1} run
while the largest scores of S_j are found, and key tiles run from the diagonal to the left. So step
j takes the keys of a tile and the values of the one before, to the right of it: the first step
takes no values, and behind the last one are values alone.

Keys have ``STAGES`` places and values one. No barrier says that a place is free: when a step's
matmuls are done, Triton has all warps meet before it starts the copies that take its places, since
barriers of the copies lie in shared memory, too (docs/kernels.md).
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
    Head,
    Inputs,
    Outputs,
    finish,
    from_words,
    masked,
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
from kernels.flash.hopper.tiles import ROWS, Edges, capped, key_tiles, sequence


class Places(NamedTuple):
    """Keys and values in shared memory, and barriers that tell when they have come."""

    k_tiles: Any
    """As copies write them, [1, 1, BLOCK_K, D] each."""
    v_tiles: Any
    k_operands: Any
    """The same bytes as matmuls read them, [BLOCK_K, D] each."""
    v_operands: Any
    k_ready: Any
    v_ready: Any


class Progress(NamedTuple):
    """Values that a program carries from one key tile to the next, as forward.Progress has them."""

    words: Any
    o: Any
    reference: Any
    total: Any


@gluon.jit
def fill(
    inputs,
    places,
    head,
    seq,
    tiles,
    keys_of,
    values_of,
    STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Copies the keys of one step and the values of one, if there are such steps."""
    num_key_tiles = tiles.stop - tiles.start
    slot = keys_of % STAGES
    has_keys = keys_of < num_key_tiles
    has_values = (values_of > 0) & (values_of <= num_key_tiles)
    # Triton has all warps meet between an expectation and a copy: so both of a kind stand together.
    mbarrier.expect(places.k_ready.index(slot), inputs.k.block_type.nbytes, pred=has_keys)
    mbarrier.expect(places.v_ready.index(0), inputs.v.block_type.nbytes, pred=has_values)
    tma.async_copy_global_to_shared(
        inputs.k,
        [seq.batch, head.kv_head, seq.k_start + (tiles.stop - 1 - keys_of) * BLOCK_K, 0],
        places.k_ready.index(slot),
        places.k_tiles.index(slot),
        pred=has_keys,
    )
    tma.async_copy_global_to_shared(
        inputs.v,
        [seq.batch, head.kv_head, seq.k_start + (tiles.stop - values_of) * BLOCK_K, 0],
        places.v_ready.index(0),
        places.v_tiles.index(0),
        pred=has_values,
    )


@gluon.jit
def start_old_values(words, o, places, step, dtype: gl.constexpr):
    """O += P V of the key tile before the step, on its way once the values have come."""
    p = from_words(words, dtype, gl.DotOperandLayout(0, o.type.layout, 2))
    mbarrier.wait(places.v_ready.index(0), (step - 1) & 1)
    return p, start_values(p, places.v_operands.index(0), o)


@gluon.jit
def advance(
    inputs,
    places,
    q_tile,
    before,
    step,
    head,
    first_row,
    seq,
    tiles,
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
    """Scores of a step's key tile while the values of the tile before are added to o."""
    words, o, reference, total = before
    dtype: gl.constexpr = q_tile.dtype
    slot = step % STAGES
    mbarrier.wait(places.k_ready.index(slot), step // STAGES & 1)
    s = start_scores(q_tile, places.k_operands.index(slot), MAIN, TAIL)
    p, o = start_old_values(words, o, places, step, dtype)
    s = warpgroup_mma_wait(1, deps=[s])
    if SOFTCAP > 0.0:
        s = capped(s, scale_log2, SOFTCAP)
        scale_log2 = 1.0
    if MASKED:
        tile = tiles.stop - 1 - step
        s = masked(s, tile, first_row, seq, edges, BLOCK_K, CAUSAL, MASK)
    reference, zero, shrink = raise_reference(s, reference, scale_log2, True, MASKED)
    # As in the other kernel, P takes the registers of the one before.
    o, p, s, shrink = warpgroup_mma_wait(0, deps=[o, p, s, shrink])
    fill(inputs, places, head, seq, tiles, step + STAGES, step + 1, STAGES, BLOCK_K)
    new_p, total = softmax_step(s, zero, shrink, total, scale_log2)
    return Progress(to_words(new_p, dtype), rescale(o, shrink, True), reference, total)


# Windows and shifts differ from call to call, and gain nothing from being known.
@gluon.jit(do_not_specialize=["batch_size", "window", "prefix_len", "shift"])
def flash_forward_small(
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
    VALUE_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """o = softmax(q k^T scale) v and its log-sum-exp, for 64 queries of one head."""
    # Keys of the next step come while this one's are read.
    gl.static_assert(STAGES >= 2)
    dtype: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    O_COLUMNS: gl.constexpr = MAIN if BLOCK_D == ROWS else BLOCK_D
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O_COLUMNS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # Copies come as [1, 1, rows, D]; the matmuls see [rows, D] of the same bytes.
    TILE: gl.constexpr = gl.NVMMASharedLayout(q_desc.layout.swizzle_byte_width, 16)
    q_tiles = gl.allocate_shared_memory(dtype, [1] + q_desc.block_type.shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    places = Places(
        k_tiles=k_tiles,
        v_tiles=v_tiles,
        k_operands=k_tiles._reinterpret(dtype, [STAGES, BLOCK_K, BLOCK_D], TILE),
        v_operands=v_tiles._reinterpret(dtype, [1, BLOCK_K, BLOCK_D], TILE),
        k_ready=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        v_ready=gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER),
    )
    batch, number, program, num_tiles = place_in_batch(
        cu_seqlens_q, batch_size, num_heads, heads_at_once, ROWS, PACKED
    )
    if PACKED and program >= num_tiles:
        return
    seq = sequence(cu_seqlens_q, cu_seqlens_k, batch, q_len, kv_len, PACKED)
    head = Head(number, number // group_size, num_tiles, program, num_tiles)
    mbarrier.init(q_ready.index(0), count=1)
    mbarrier.init(places.v_ready.index(0), count=1)
    for place in gl.static_range(STAGES):
        mbarrier.init(places.k_ready.index(place), count=1)

    inputs = Inputs(q_desc, k_desc, v_desc)
    outputs = Outputs(o_ptr, lse_ptr, stride_ob, stride_oh, stride_os, num_heads, lse_len)
    edges = Edges(window, prefix_len, shift)
    first_row = query_tile(0, head, 1, CAUSAL) * ROWS
    tiles = key_tiles(first_row, seq.q_len, seq.kv_len, edges, ROWS, BLOCK_K, CAUSAL, MASK)
    num_key_tiles = tiles.stop - tiles.start
    reference = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = row_sums_by_thread(gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT))
    o = gl.zeros([ROWS, O_COLUMNS], gl.float32, O_LAYOUT)
    if num_key_tiles > 0:
        mbarrier.expect(q_ready.index(0), inputs.q.block_type.nbytes)
        tma.async_copy_global_to_shared(
            inputs.q,
            [seq.batch, head.head, seq.q_start + first_row, 0],
            q_ready.index(0),
            q_tiles.index(0),
        )
        for early in gl.static_range(STAGES):
            # Values of the first step that has some.
            fill(
                inputs, places, head, seq, tiles, early, 1 if early == 1 else 0, STAGES, BLOCK_K
            )  # fmt: skip
        q_tile = q_tiles._reinterpret(dtype, [1, ROWS, BLOCK_D], TILE).index(0)
        mbarrier.wait(q_ready.index(0), 0)
        mbarrier.wait(places.k_ready.index(0), 0)
        s = start_scores(q_tile, places.k_operands.index(0), MAIN, TAIL)
        s = warpgroup_mma_wait(0, deps=[s])
        fill(inputs, places, head, seq, tiles, STAGES, 0, STAGES, BLOCK_K)
        scale = scale_log2
        if SOFTCAP > 0.0:
            s = capped(s, scale_log2, SOFTCAP)
            scale = 1.0
        s = masked(s, tiles.stop - 1, first_row, seq, edges, BLOCK_K, CAUSAL, MASK)
        reference, zero, shrink = raise_reference(s, reference, scale, True, True)
        p, total = softmax_step(s, zero, shrink, total, scale)
        progress = Progress(to_words(p, dtype), o, reference, total)
        # The first tile has been visited.
        plain = gl.maximum(tiles.stop - tiles.unmasked_stop, 1)
        left = num_key_tiles
        if MASK == "window":
            left = gl.maximum(tiles.stop - tiles.unmasked_start, 1)
        for step in range(1, plain):
            progress = advance(
                inputs, places, q_tile, progress, step, head, first_row, seq, tiles, edges,
                scale_log2, STAGES, BLOCK_K, MAIN, TAIL, CAUSAL, MASK, SOFTCAP, True,
            )  # fmt: skip
        for step in range(plain, left):
            progress = advance(
                inputs, places, q_tile, progress, step, head, first_row, seq, tiles, edges,
                scale_log2, STAGES, BLOCK_K, MAIN, TAIL, CAUSAL, MASK, SOFTCAP, False,
            )  # fmt: skip
        if MASK == "window":
            for step in range(left, num_key_tiles):
                progress = advance(
                    inputs, places, q_tile, progress, step, head, first_row, seq, tiles, edges,
                    scale_log2, STAGES, BLOCK_K, MAIN, TAIL, CAUSAL, MASK, SOFTCAP, True,
                )  # fmt: skip
        words, o, reference, total = progress
        p, o = start_old_values(words, o, places, num_key_tiles, dtype)
        o = warpgroup_mma_wait(0, deps=[o])

    finish(o, reference, total, first_row, head, seq, outputs, VALUE_DIM)
