"""The facts of a call of flash_decode, and the checks of its arguments."""

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
    rotary_dim_of,
)
from kernels.rotary import Rotary

MAX_HEAD_DIM = 256


def describe_flash(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    rotary: Rotary | None,
    out: Tensor | None,
) -> Call:
    """The facts of a call of flash_decode; ValueError if it makes no sense."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense_rows(name, cache)
    return _checked_flash(
        *map(facts_of, (q, k_new, v_new, k_cache, v_cache, lengths)),
        None if block_table is None else facts_of(block_table),
        None if rotary is None else (facts_of(rotary.cos), facts_of(rotary.sin)),
        facts_of_out(out),
    )


@lru_cache(maxsize=4096)
def _checked_flash(
    q: Facts,
    k_new: Facts,
    v_new: Facts,
    k_cache: Facts,
    v_cache: Facts,
    lengths: Facts,
    block_table: Facts | None,
    angles: tuple[Facts, Facts] | None,
    out: Facts | None,
) -> Call:
    check_dims("q", q, "[batch, heads, new tokens, head_dim]")
    check_dims("k_new", k_new, "[batch, kv_heads, new tokens, head_dim]")
    batch_size, num_heads, new, head_dim = q[0]
    num_kv_heads = k_new[0][1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"k_new has {num_kv_heads} heads: must divide the {num_heads} heads of q")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q has head_dim {head_dim}: must be 1 to {MAX_HEAD_DIM}")
    new_shape = torch.Size((batch_size, num_kv_heads, new, head_dim))
    check_like("k_new", k_new, new_shape, q)
    check_like("v_new", v_new, new_shape, q)
    check_dims("k_cache", k_cache, "4-dimensional")
    rows, page, capacity = cache_size(k_cache[0][0], k_cache[0][2], batch_size, block_table)
    cache_shape = torch.Size((rows, num_kv_heads, k_cache[0][2], head_dim))
    check_like("k_cache", k_cache, cache_shape, q)
    check_like("v_cache", v_cache, cache_shape, q)
    check_lengths(lengths, block_table, batch_size, q[2])
    check_new(new, capacity)
    rotary_dim = 0
    if angles is not None:
        rotary_dim = rotary_dim_of(*angles, head_dim, q[2])
    if out is not None:
        check_like("out", out, q[0], q)
    return Call(
        device=q[2],
        dtype=q[1],
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        new=new,
        head_dim=head_dim,
        capacity=capacity,
        page=page,
        rotary_dim=rotary_dim,
    )
