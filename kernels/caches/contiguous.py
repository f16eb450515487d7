"""A contiguous cache: keys and values [batch, kv_heads, max_len, head_dim] of each layer.

Every sequence has its longest length set aside from the start, whether it comes to use it or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.caches import key_values, places
from kernels.caches.choice import CacheChoice, CacheShape, cache_choice
from kernels.registry import Look


@cache_choice("contiguous", look=Look(place=0))
@dataclass(kw_only=True, slots=True)
class Contiguous(CacheChoice):
    """max_len places for each sequence, one after another."""

    def allocate(
        self, shape: CacheShape, device: torch.device | str, *, seed: int | None = None
    ) -> key_values.KeyValueCache:
        taken = places.Places(shape.batch_size, shape.max_len, device)
        return key_values.KeyValueCache(shape, taken, leading=shape.batch_size, inner=shape.max_len)
