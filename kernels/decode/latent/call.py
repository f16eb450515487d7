"""The facts of calls over a cache of latents, and the checks of their arguments."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kernels.decode.call import (
    Call,
    Facts,
    cache_size,
    check_dense_rows,
    check_dims,
    check_lengths,
    check_like,
    check_new,
    facts_of,
    facts_of_out,
    name_of,
    rotary_dim_of,
    show,
)
from kernels.rotary import Rotary


def describe_latent(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    out: Tensor | None,
) -> Call:
    """The facts of a call of mla_decode; ValueError if it makes no sense."""
    check_dense_rows("latent_cache", latent_cache)
    return _checked_latent(
        *map(facts_of, (q_latent, q_rope, latent_cache, lengths)),
        None if block_table is None else facts_of(block_table),
        facts_of_out(out),
    )


def describe_append(
    q_rope: Tensor,
    c_new: Tensor,
    k_rope: Tensor,
    latent_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    rotary: Rotary | None,
    lengths_after: Tensor | None,
) -> Call:
    """The facts of a call of latent_append; ValueError if it makes no sense."""
    check_dense_rows("latent_cache", latent_cache)
    if lengths_after is not None:
        check_dense_rows("lengths_after", lengths_after)
    return _checked_append(
        *map(facts_of, (q_rope, c_new, k_rope, latent_cache, lengths)),
        None if block_table is None else facts_of(block_table),
        None if rotary is None else (facts_of(rotary.cos), facts_of(rotary.sin)),
        None if lengths_after is None else facts_of(lengths_after),
    )


@lru_cache(maxsize=4096)
def _checked_latent(
    q: Facts,
    q_rope: Facts,
    cache: Facts,
    lengths: Facts,
    block_table: Facts | None,
    out: Facts | None,
) -> Call:
    check_dims("q_latent", q, "[batch, heads, new tokens, rank]")
    check_dims("q_rope", q_rope, "[batch, heads, new tokens, rope_dim]")
    batch_size, num_heads, new, rank = q[0]
    rope_dim = q_rope[0][3]
    if min(num_heads, rank, rope_dim) < 1:
        raise ValueError(
            f"q_latent is {show(q[0])} and q_rope {show(q_rope[0])}: "
            "must have heads, a rank and a rope_dim of 1 or more"
        )
    check_like("q_rope", q_rope, torch.Size((batch_size, num_heads, new, rope_dim)), q)
    page, capacity = _latent_cache_size(cache, rank + rope_dim, batch_size, block_table, q)
    check_lengths(lengths, block_table, batch_size, q[2])
    check_new(new, capacity)
    if out is not None:
        check_like("out", out, q[0], q)
    return Call(
        device=q[2],
        dtype=q[1],
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=1,
        new=new,
        head_dim=rank,
        capacity=capacity,
        page=page,
        rope_dim=rope_dim,
    )


@lru_cache(maxsize=4096)
def _checked_append(
    q_rope: Facts,
    c_new: Facts,
    k_rope: Facts,
    cache: Facts,
    lengths: Facts,
    block_table: Facts | None,
    angles: tuple[Facts, Facts] | None,
    lengths_after: Facts | None,
) -> Call:
    check_dims("q_rope", q_rope, "[batch, heads, new tokens, rope_dim]")
    batch_size, num_heads, new, rope_dim = q_rope[0]
    if len(c_new[0]) != 3:
        raise ValueError(f"c_new is {show(c_new[0])}: must be [batch, new tokens, rank]")
    rank = c_new[0][2]
    if min(num_heads, rank, rope_dim) < 1:
        raise ValueError(
            f"q_rope is {show(q_rope[0])} and c_new {show(c_new[0])}: "
            "must have heads, a rank and a rope_dim of 1 or more"
        )
    check_like("c_new", c_new, torch.Size((batch_size, new, rank)), q_rope)
    check_like("k_rope", k_rope, torch.Size((batch_size, new, rope_dim)), q_rope)
    page, capacity = _latent_cache_size(cache, rank + rope_dim, batch_size, block_table, q_rope)
    check_lengths(lengths, block_table, batch_size, q_rope[2])
    if lengths_after is not None and lengths_after != lengths:
        raise ValueError(
            f"lengths_after is {show(lengths_after[0])} {name_of(lengths_after[1])} on "
            f"{lengths_after[2]}: must be [{batch_size}] int32 on {q_rope[2]}"
        )
    check_new(new, capacity)
    rotary_dim = 0
    if angles is not None:
        wide = (torch.float32, torch.float64)
        rotary_dim = rotary_dim_of(*angles, rope_dim, q_rope[2], dtypes=wide)
    return Call(
        device=q_rope[2],
        dtype=q_rope[1],
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=1,
        new=new,
        head_dim=rank,
        capacity=capacity,
        page=page,
        rotary_dim=rotary_dim,
        rope_dim=rope_dim,
    )


def _latent_cache_size(
    cache: Facts, width: int, batch_size: int, block_table: Facts | None, q: Facts
) -> tuple[int, int]:
    """Block size or 0, and capacity of a sequence, of a cache of latents of this width."""
    if len(cache[0]) != 3:
        layout = "[batch, max_len, rank + rope_dim], or with a block table [blocks, block_size, ..]"
        raise ValueError(f"latent_cache is {show(cache[0])}: must be {layout}")
    rows, page, capacity = cache_size(cache[0][0], cache[0][1], batch_size, block_table)
    check_like("latent_cache", cache, torch.Size((rows, cache[0][1], width)), q)
    return page, capacity
