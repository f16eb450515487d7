"""A cache of latents: their storage by layer, contiguous or paged."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.caches.choice import CacheShape
from kernels.caches.key_values import next_slots, require_shape
from kernels.caches.places import Places, Slots


class LatentCache:
    """Latents [leading, inner, r + d_rope] by layer, and the places of their tokens.

    Args:
        places: where tokens lie.
        leading: sequences, or blocks.
        inner: places in a sequence, or in a block.
    """

    def __init__(self, shape: CacheShape, places: Places, leading: int, inner: int) -> None:
        if shape.kv_lora_rank < 1:
            raise ValueError(f"cache: kv_lora_rank={shape.kv_lora_rank}: must be at least 1")
        self.shape = shape
        self.places = places
        size = (leading, inner, shape.elements_per_token)
        dtype = getattr(torch, shape.dtype)
        self.latents = [
            torch.zeros(size, dtype=dtype, device=places.device) for _ in range(shape.num_layers)
        ]

    @property
    def storage_bytes(self) -> int:
        """Bytes allocated for tokens."""
        return sum(x.numel() * x.element_size() for x in self.latents)

    def store(self, layer: int, slots: Slots, latents: Tensor) -> None:
        """Write latents [..., r + d_rope] of tokens whose slots have the leading shape.

        Raises ValueError, with nothing written, for latents of another shape.
        """
        require_shape("latents", latents, (*slots[0].shape, self.shape.elements_per_token))
        self.latents[layer][slots] = latents

    def append(self, layer: int, latents_BTC: Tensor) -> None:
        """Write new tokens behind each sequence's last in one layer; lengths stay.

        Raises ValueError, with nothing changed, if a sequence has no room for them, or latents
        have another shape than [B, T, r + d_rope].
        """
        num_tokens = latents_BTC.shape[-2]
        expected = (self.places.batch_size, num_tokens, self.shape.elements_per_token)
        require_shape("latents", latents_BTC, expected)
        self.places.reserve(num_tokens)
        self.store(layer, next_slots(self.places, num_tokens), latents_BTC)

    def sequence(self, layer: int, index: int, num_tokens: int) -> Tensor:
        """A copy of one sequence's first tokens, [num_tokens, r + d_rope]."""
        return self.latents[layer][self.places.of_sequence(index, num_tokens)]

    def clear_behind(self, num_tokens: int) -> None:
        """Zero what forgotten tokens left behind the next ``num_tokens`` of every sequence."""
        slots = self.places.take_left_behind(num_tokens)
        if slots is not None:
            for storage in self.latents:
                storage[slots] = 0.0

    def dense(self, layer: int, num_tokens: int, forgotten: Tensor | None = None) -> Tensor:
        """The first ``num_tokens`` places of every sequence, [B, num_tokens, r + d_rope].

        Args:
            forgotten: bool [B, num_tokens], places to read as zero; of a paged cache alone, in
                whose blocks there is what other sequences left, or hold.
        """
        latents = self.latents[layer]
        table, size = self.places.block_table, self.places.block_size
        if table is None or size is None:
            return latents[:, :num_tokens]
        blocks = table[:, : -(-num_tokens // size)].long()
        rows = latents[blocks].flatten(1, 2)[:, :num_tokens]
        return rows if forgotten is None else rows.masked_fill_(forgotten[..., None], 0.0)
