"""A paged cache: keys and values in blocks [num_blocks, kv_heads, block_size, head_dim].

A block table says which blocks a sequence has, in order, and a free list which ones nobody has
(Kwon et al., PagedAttention, 2023): a sequence takes no more memory than its own tokens need, but
for the rest of its last block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.caches import key_values, places
from kernels.caches.choice import CacheChoice, CacheShape, cache_choice


@cache_choice("paged")
@dataclass(kw_only=True, slots=True)
class Paged(CacheChoice):
    """Blocks of any size, from a pool that all sequences share."""

    block_size: int = 64
    """Tokens in a block."""
    num_blocks: int | None = None
    """Blocks in the pool; None is enough for every sequence to reach its longest length."""

    def __post_init__(self) -> None:
        for key, value in (("block_size", self.block_size), ("num_blocks", self.num_blocks)):
            if value is not None and value < 1:
                raise ValueError(f"cache.{key}={value}: must be at least 1")

    @property
    def tokens_per_block(self) -> int | None:
        return self.block_size

    def storage_bytes(self, shape: CacheShape) -> int:
        if self.num_blocks is None:
            # Not super(): dataclasses with slots are made anew, which its zero-argument form
            # does not survive.
            return CacheChoice.storage_bytes(self, shape)
        return self.num_blocks * self.block_size * shape.bytes_per_token

    def allocate(
        self, shape: CacheShape, device: torch.device | str, *, seed: int | None = None
    ) -> key_values.KeyValueCache:
        taken = places.BlockPlaces(
            shape.batch_size,
            shape.max_len,
            self.block_size,
            device,
            num_blocks=self.num_blocks,
            seed=seed,
        )
        blocks = taken.allocator.num_blocks
        return key_values.KeyValueCache(shape, taken, leading=blocks, inner=self.block_size)
