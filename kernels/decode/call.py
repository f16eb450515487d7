"""One call of the decode kernels in facts: shapes, dtypes and what is refused.

The facts follow from shapes, dtypes and devices alone, so that the checks run once for each
combination; what only the device knows (whether the new tokens fit, whether the block table
points inside) the owner of the cache has to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.rotary import Rotary

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256

_Facts = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(kw_only=True, slots=True, frozen=True)
class Call:
    """A valid call. A latent cache counts as one KV head, of width ``rope_dim`` more."""

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    num_heads: int
    num_kv_heads: int
    new: int
    """New tokens of each sequence."""
    head_dim: int
    """Of values: of a latent cache the rank."""
    capacity: int
    """Tokens that a sequence's part of the cache can hold."""
    page: int
    """Tokens of a block; 0 for a contiguous cache."""
    rotary_dim: int = 0
    rope_dim: int = 0

    @property
    def block_d(self) -> int:
        """head_dim as the kernels pad it: a power of two, at least 16."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_rows(self) -> int:
        """Queries that attend to the same keys."""
        return self.group_size * self.new


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
        _check_dense_rows(name, cache)
    return _checked_flash(
        *map(_facts, (q, k_new, v_new, k_cache, v_cache, lengths)),
        None if block_table is None else _facts(block_table),
        None if rotary is None else (_facts(rotary.cos), _facts(rotary.sin)),
        _out_facts(out),
    )


@lru_cache(maxsize=4096)
def _checked_flash(
    q: _Facts,
    k_new: _Facts,
    v_new: _Facts,
    k_cache: _Facts,
    v_cache: _Facts,
    lengths: _Facts,
    block_table: _Facts | None,
    angles: tuple[_Facts, _Facts] | None,
    out: _Facts | None,
) -> Call:
    _check_dims("q", q, "[batch, heads, new tokens, head_dim]")
    _check_dims("k_new", k_new, "[batch, kv_heads, new tokens, head_dim]")
    batch_size, num_heads, new, head_dim = q[0]
    num_kv_heads = k_new[0][1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"k_new has {num_kv_heads} heads: must divide the {num_heads} heads of q")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q has head_dim {head_dim}: must be 1 to {MAX_HEAD_DIM}")
    new_shape = torch.Size((batch_size, num_kv_heads, new, head_dim))
    _check_like("k_new", k_new, new_shape, q)
    _check_like("v_new", v_new, new_shape, q)
    _check_dims("k_cache", k_cache, "4-dimensional")
    rows, page, capacity = _cache_size(k_cache[0][0], k_cache[0][2], batch_size, block_table)
    cache_shape = torch.Size((rows, num_kv_heads, k_cache[0][2], head_dim))
    _check_like("k_cache", k_cache, cache_shape, q)
    _check_like("v_cache", v_cache, cache_shape, q)
    _check_lengths(lengths, block_table, batch_size, q[2])
    _check_new(new, capacity)
    rotary_dim = 0
    if angles is not None:
        rotary_dim = _rotary_dim(*angles, head_dim, q[2])
    if out is not None:
        _check_like("out", out, q[0], q)
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


def _cache_size(
    rows: int, tokens: int, batch_size: int, block_table: _Facts | None
) -> tuple[int, int, int]:
    """First dimension that the cache must have, block size or 0, and capacity of a sequence."""
    if block_table is None:
        return batch_size, 0, tokens
    if tokens < 1:
        raise ValueError("the paged cache has a block size of 0: must be 1 or more")
    if len(block_table[0]) != 2:
        raise ValueError(f"block_table is {_show(block_table[0])}: must be [batch, blocks]")
    return rows, tokens, tokens * block_table[0][1]


def _check_dims(name: str, facts: _Facts, layout: str) -> None:
    if len(facts[0]) != 4:
        raise ValueError(f"{name} is {_show(facts[0])}: must be {layout}")
    if facts[1] not in DTYPES:
        raise ValueError(f"{name} is {_name(facts[1])}: must be one of {_names(DTYPES)}")


def _check_like(name: str, facts: _Facts, shape: torch.Size, q: _Facts) -> None:
    if facts != (shape, q[1], q[2]):
        raise ValueError(
            f"{name} is {_show(facts[0])} {_name(facts[1])} on {facts[2]}: "
            f"must be {_show(shape)} {_name(q[1])} on {q[2]}, to fit the queries"
        )


def _check_lengths(
    lengths: _Facts, block_table: _Facts | None, batch_size: int, device: torch.device
) -> None:
    if lengths != (torch.Size((batch_size,)), torch.int32, device):
        raise ValueError(
            f"lengths is {_show(lengths[0])} {_name(lengths[1])} on {lengths[2]}: "
            f"must be [{batch_size}] int32 on {device}"
        )
    if block_table is not None and (
        block_table[0][0] != batch_size or block_table[1:] != (torch.int32, device)
    ):
        raise ValueError(
            f"block_table is {_show(block_table[0])} {_name(block_table[1])} on {block_table[2]}: "
            f"must be [{batch_size}, blocks] int32 on {device}"
        )


def _check_new(new: int, capacity: int) -> None:
    if not 1 <= new <= max(capacity, 1):
        raise ValueError(f"q has {new} new tokens: must be 1 to {capacity}, the cache's capacity")
    if capacity < 1:
        raise ValueError("the cache has no room: its capacity must be 1 token or more")


def _rotary_dim(
    cos: _Facts,
    sin: _Facts,
    head_dim: int,
    device: torch.device,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> int:
    for name, facts in (("rotary.cos", cos), ("rotary.sin", sin)):
        known = facts[1] in dtypes and facts[2] == device
        if len(facts[0]) != 2 or not known or facts != cos:
            raise ValueError(
                f"{name} is {_show(facts[0])} {_name(facts[1])} on {facts[2]}: must be [positions, "
                f"rotary_dim / 2] {' or '.join(map(_name, dtypes))} on {device}, cos and sin alike"
            )
    rotary_dim = 2 * cos[0][1]
    if rotary_dim > head_dim:
        raise ValueError(f"rotary.cos turns {rotary_dim} entries: must be at most {head_dim}")
    return rotary_dim


def _check_dense_rows(name: str, cache: Tensor) -> None:
    if cache.numel() and cache.stride(-1) != 1:
        raise ValueError(f"{name} has a last stride of {cache.stride(-1)}: must be 1")


def _facts(x: Tensor) -> _Facts:
    return x.shape, x.dtype, x.device


def _out_facts(out: Tensor | None) -> _Facts | None:
    if out is None:
        return None
    _check_dense_rows("out", out)
    return _facts(out)


def _show(shape: Sequence[int]) -> str:
    return str(list(shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(_name, dtypes))
