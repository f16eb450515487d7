"""A latent cache, for multi-head latent attention (DeepSeek-V2, section 2.1).

It holds one compressed vector c of rank r for each token, from which all heads' keys and values
are up-projected, and one rotary part of the key that all heads share: [tokens, r + d_rope] a
layer, contiguous or in blocks. Kernels for it often want blocks of 64 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.caches import latents, places
from kernels.caches.choice import CacheChoice, CacheShape, cache_choice


@cache_choice("latent")
@dataclass(kw_only=True, slots=True)
class Latent(CacheChoice):
    """Compressed latents with their rotary part."""

    block_size: int | None = 64
    """Tokens in a block; null keeps each sequence's tokens one after another."""

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"cache.block_size={self.block_size}: must be at least 1, or null")

    @property
    def is_latent(self) -> bool:
        return True

    @property
    def tokens_per_block(self) -> int | None:
        return self.block_size

    def allocate(
        self, shape: CacheShape, device: torch.device | str, *, seed: int | None = None
    ) -> latents.LatentCache:
        if self.block_size is None:
            rows = places.Places(shape.batch_size, shape.max_len, device)
            return latents.LatentCache(shape, rows, leading=shape.batch_size, inner=shape.max_len)
        taken = places.BlockPlaces(
            shape.batch_size, shape.max_len, self.block_size, device, seed=seed
        )
        blocks = taken.allocator.num_blocks
        return latents.LatentCache(shape, taken, leading=blocks, inner=self.block_size)
