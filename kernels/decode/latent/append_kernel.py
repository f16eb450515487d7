"""One kernel for new tokens of absorbed latent attention: rotates queries, appends latents.

By operators this is a dozen launches a layer (positions, places, angles, two rotations, a
concatenation and a scatter) of a microsecond each, which the host takes far longer to make than
the attention after them takes. ROW_TILES programs of a sequence turn the rotary part of its
queries, row h * NEW + t of which is head h at new token t; the others each write a few new tokens
[c, turned key] behind the sequence's last. None reads what another writes.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode.cache_tiles import load_rotated, load_rows


@triton.jit(do_not_specialize=["capacity", "max_positions"])
def latent_append_kernel(
    q_rope_ptr,
    c_new_ptr,
    k_rope_ptr,
    cache_ptr,
    lengths_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    lengths_after_ptr,
    q_rope_stride_b,
    q_rope_stride_h,
    q_rope_stride_t,
    c_new_stride_b,
    c_new_stride_t,
    k_rope_stride_b,
    k_rope_stride_t,
    cache_stride_b,
    cache_stride_n,
    table_stride,
    angle_stride,
    capacity,
    max_positions,
    NUM_HEADS: tl.constexpr,
    NEW: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROW_TILES: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Fills out [B, H, NEW, ROPE_DIM] and the cache; grid: B * (ROW_TILES + TOKEN_TILES).

    ``cache_stride_b`` is a sequence's stride, or a block's if paged; with COUNTS
    ``lengths_after`` is filled, too.
    """
    sequence = tl.program_id(0) // (ROW_TILES + TOKEN_TILES)
    tile = tl.program_id(0) % (ROW_TILES + TOKEN_TILES)
    batch = tl.cast(sequence, tl.int64)
    length = tl.load(lengths_ptr + sequence)

    if tile < ROW_TILES:
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_inside = row < NUM_HEADS * NEW
        q_rows = (
            q_rope_ptr + batch * q_rope_stride_b
            + row // NEW * q_rope_stride_h + row % NEW * q_rope_stride_t
        )  # fmt: skip
        q = load_rotated(
            q_rows, row_inside, length + row % NEW, cos_ptr, sin_ptr, angle_stride, max_positions,
            ROPE_DIM, BLOCK_ROPE, ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
        out_rows = out_ptr + (batch * (NUM_HEADS * NEW) + row) * ROPE_DIM
        _store_rows(out_rows, q, row_inside, ROPE_DIM, BLOCK_ROPE)
    else:
        new = (tile - ROW_TILES) * BLOCK_T + tl.arange(0, BLOCK_T)
        new_inside = new < NEW
        position = length + new
        c = load_rows(
            c_new_ptr + batch * c_new_stride_b + new * c_new_stride_t, new_inside, RANK, BLOCK_D
        )
        k_rope = load_rotated(
            k_rope_ptr + batch * k_rope_stride_b + new * k_rope_stride_t, new_inside, position,
            cos_ptr, sin_ptr, angle_stride, max_positions,
            ROPE_DIM, BLOCK_ROPE, ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
        # The caller guarantees room; other sequences' memory is never written.
        fits = new_inside & (position < capacity)
        if PAGE == 0:
            rows = cache_ptr + batch * cache_stride_b
            rows = rows + tl.cast(position, tl.int64) * cache_stride_n
        else:
            entries = table_ptr + batch * table_stride + position // PAGE
            block = tl.cast(tl.load(entries, mask=fits, other=0), tl.int64)
            rows = cache_ptr + block * cache_stride_b + position % PAGE * cache_stride_n
        _store_rows(rows, c, fits, RANK, BLOCK_D)
        _store_rows(rows + RANK, k_rope, fits, ROPE_DIM, BLOCK_ROPE)
        if COUNTS:
            tl.store(lengths_after_ptr + sequence, length + NEW, mask=tile == ROW_TILES)


@triton.jit
def _store_rows(pointers, x, inside, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    """The inverse of :func:`kernels.decode.cache_tiles.load_rows`."""
    columns = tl.arange(0, BLOCK_W)
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointers[:, None] + columns[None, :], x, mask=mask)
