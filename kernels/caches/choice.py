"""The base class of every choice of ``cache=``, and the bytes of a cache by formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.registry import Registry

CACHES: Registry[type[CacheChoice]] = Registry(
    "cache", decorator="cache_choice", packages=("kernels.caches",)
)

cache_choice = CACHES.register

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

INDEX_BYTES = 4
"""A length, or an entry of a block table, is an int32."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CacheShape:
    """The size of a cache: tokens of each sequence, and the elements that each token adds."""

    num_layers: int
    batch_size: int
    max_len: int
    """Tokens that each sequence has room for."""
    num_kv_heads: int = 1
    head_dim: int = 1
    kv_lora_rank: int = 0
    """Width r of the compressed latent; 0 where keys and values are kept."""
    rope_head_dim: int = 0
    """Width of the rotary part of a latent, which all heads share."""
    dtype: str = "bfloat16"

    @property
    def elements_per_token(self) -> int:
        """Elements in one layer: keys and values of all heads, or a latent with its rotary part."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.rope_head_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes in all layers."""
        return self.num_layers * self.elements_per_token * ELEMENT_BYTES[self.dtype]


@dataclass(kw_only=True, slots=True)
class CacheChoice:
    """A choice of ``cache=``; its fields are options."""

    name: str

    @property
    def is_latent(self) -> bool:
        """Whether it keeps compressed latents instead of keys and values."""
        return False

    @property
    def tokens_per_block(self) -> int | None:
        """Tokens in a block; None where the tokens of a sequence lie one after another."""
        return None

    @property
    def label(self) -> str:
        """The cache's name in tables, one word: ``paged64``."""
        size = self.tokens_per_block
        return self.name if size is None else f"{self.name}{size}"

    def storage_bytes(self, shape: CacheShape) -> int:
        """Bytes that :meth:`allocate` takes for tokens; a last block counts whole."""
        size = self.tokens_per_block or 1
        held = -(-shape.max_len // size) * size
        return shape.batch_size * held * shape.bytes_per_token

    def index_bytes(self, shape: CacheShape) -> int:
        """Bytes of lengths and block tables."""
        size = self.tokens_per_block
        blocks = 0 if size is None else -(-shape.max_len // size)
        return INDEX_BYTES * shape.batch_size * (1 + blocks)

    def allocate(
        self, shape: CacheShape, device: torch.device | str, *, seed: int | None = None
    ) -> Any:
        """An empty cache. With a seed, blocks are given out in an order drawn from it."""
        raise NotImplementedError
