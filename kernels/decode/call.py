"""The facts of a decode kernel's call, and the checks that all calls share.

The facts follow from shapes, dtypes and devices alone, so that the checks run once for each
combination. Only the device knows whether the new tokens fit and whether the block table points
inside; the owner of the cache checks that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Facts = tuple[torch.Size, torch.dtype, torch.device]


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
    """Width of a value; for a latent cache the rank."""
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


def cache_size(
    rows: int, tokens: int, batch_size: int, block_table: Facts | None
) -> tuple[int, int, int]:
    """First dimension that the cache must have, block size or 0, and capacity of a sequence."""
    if block_table is None:
        return batch_size, 0, tokens
    if tokens < 1:
        raise ValueError("the paged cache has a block size of 0: must be 1 or more")
    if len(block_table[0]) != 2:
        raise ValueError(f"block_table is {show(block_table[0])}: must be [batch, blocks]")
    return rows, tokens, tokens * block_table[0][1]


def check_dims(name: str, facts: Facts, layout: str) -> None:
    if len(facts[0]) != 4:
        raise ValueError(f"{name} is {show(facts[0])}: must be {layout}")
    if facts[1] not in DTYPES:
        raise ValueError(f"{name} is {name_of(facts[1])}: must be one of {names_of(DTYPES)}")


def check_like(name: str, facts: Facts, shape: torch.Size, q: Facts) -> None:
    if facts != (shape, q[1], q[2]):
        raise ValueError(
            f"{name} is {show(facts[0])} {name_of(facts[1])} on {facts[2]}: "
            f"must be {show(shape)} {name_of(q[1])} on {q[2]}, to fit the queries"
        )


def check_lengths(
    lengths: Facts, block_table: Facts | None, batch_size: int, device: torch.device
) -> None:
    if lengths != (torch.Size((batch_size,)), torch.int32, device):
        raise ValueError(
            f"lengths is {show(lengths[0])} {name_of(lengths[1])} on {lengths[2]}: "
            f"must be [{batch_size}] int32 on {device}"
        )
    if block_table is not None and (
        block_table[0][0] != batch_size or block_table[1:] != (torch.int32, device)
    ):
        raise ValueError(
            f"block_table is {show(block_table[0])} {name_of(block_table[1])} on {block_table[2]}: "
            f"must be [{batch_size}, blocks] int32 on {device}"
        )


def check_new(new: int, capacity: int) -> None:
    if not 1 <= new <= max(capacity, 1):
        raise ValueError(f"q has {new} new tokens: must be 1 to {capacity}, the cache's capacity")
    if capacity < 1:
        raise ValueError("the cache has no room: its capacity must be 1 token or more")


def rotary_dim_of(
    cos: Facts,
    sin: Facts,
    head_dim: int,
    device: torch.device,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> int:
    for name, facts in (("rotary.cos", cos), ("rotary.sin", sin)):
        known = facts[1] in dtypes and facts[2] == device
        if len(facts[0]) != 2 or not known or facts != cos:
            raise ValueError(
                f"{name} is {show(facts[0])} {name_of(facts[1])} on {facts[2]}: must be "
                f"[positions, rotary_dim / 2] {' or '.join(map(name_of, dtypes))} on {device}, "
                "cos and sin alike"
            )
    rotary_dim = 2 * cos[0][1]
    if rotary_dim > head_dim:
        raise ValueError(f"rotary.cos turns {rotary_dim} entries: must be at most {head_dim}")
    return rotary_dim


def check_dense_rows(name: str, cache: Tensor) -> None:
    if cache.numel() and cache.stride(-1) != 1:
        raise ValueError(f"{name} has a last stride of {cache.stride(-1)}: must be 1")


def facts_of(x: Tensor) -> Facts:
    return x.shape, x.dtype, x.device


def facts_of_out(out: Tensor | None) -> Facts | None:
    if out is None:
        return None
    check_dense_rows("out", out)
    return facts_of(out)


def show(shape: Sequence[int]) -> str:
    return str(list(shape))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def names_of(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(name_of, dtypes))
