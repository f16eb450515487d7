"""Tiles of keys and values from contiguous and paged caches, and rows rotated as they are loaded.

PAGE is the block size of a paged cache in tokens, 0 for a contiguous one. Where a block holds
whole tiles, a tile needs one entry of the block table; else each of its keys looks up its own.
Entries are read a tile ahead, so that keys do not wait for them.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def blocks_of(table_ptr, tile, length, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Entries of one sequence's block table for a tile: a scalar, or one for each key.

    Zero beyond ``length`` and for a contiguous cache. An entry there is never read: it may be
    anything.
    """
    if PAGE == 0:
        blocks = tile * 0
    elif PAGE % BLOCK_N == 0:
        position = tile * BLOCK_N
        blocks = tl.load(table_ptr + position // PAGE, mask=position < length, other=0)
    else:
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        blocks = tl.load(table_ptr + positions // PAGE, mask=positions < length, other=0)
    return blocks


@triton.jit
def tile_rows(
    base_ptr, tile, blocks, block_stride, row_stride, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Pointers [BLOCK_N] to the keys of a tile; ``base_ptr`` is the head in block 0 if paged."""
    rows = tl.arange(0, BLOCK_N)
    if PAGE == 0:
        first = base_ptr + tl.cast(tile * BLOCK_N, tl.int64) * row_stride
        pointers = first + rows * row_stride
    elif PAGE % BLOCK_N == 0:
        first = base_ptr + tl.cast(blocks, tl.int64) * block_stride
        pointers = first + (tile * BLOCK_N % PAGE + rows) * row_stride
    else:
        in_block = (tile * BLOCK_N + rows) % PAGE
        pointers = base_ptr + tl.cast(blocks, tl.int64) * block_stride + in_block * row_stride
    return pointers


@triton.jit
def load_rows(pointers, inside, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    """[rows, BLOCK_W] from row pointers, zero for rows not ``inside`` and past WIDTH."""
    columns = tl.arange(0, BLOCK_W)
    mask = inside[:, None]
    if WIDTH != BLOCK_W:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_rotated(
    pointers,
    inside,
    positions,
    cos_ptr,
    sin_ptr,
    angle_stride,
    max_positions,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rows as :func:`load_rows`, the first ROTARY_DIM entries turned by their position's angles.

    In float32, rounded once at the end. The other entry of a pair is loaded a second time, from
    L1, which spares an exchange between threads.
    """
    x = load_rows(pointers, inside, HEAD_DIM, BLOCK_D)
    if ROTARY_DIM > 0:
        columns = tl.arange(0, BLOCK_D)
        if INTERLEAVED:
            partner = columns ^ 1
            angle = columns // 2
            is_first = columns % 2 == 0
        else:
            is_first = columns < ROTARY_DIM // 2
            angle = tl.where(is_first, columns, columns - ROTARY_DIM // 2)
            partner = tl.where(is_first, columns + ROTARY_DIM // 2, angle)
        turned = columns < ROTARY_DIM
        y = tl.load(
            pointers[:, None] + partner[None, :], mask=inside[:, None] & turned[None, :], other=0.0
        )  # fmt: skip
        known = (inside & (positions < max_positions))[:, None] & turned[None, :]
        angles = tl.cast(positions, tl.int64)[:, None] * angle_stride + angle[None, :]
        cos = tl.load(cos_ptr + angles, mask=known, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=known, other=0.0).to(tl.float32)
        other = tl.where(is_first[None, :], -1.0, 1.0) * y.to(tl.float32)
        x = (x.to(tl.float32) * cos + other * sin).to(x.dtype)
    return x
