"""A cache of keys and values: their storage by layer, contiguous or paged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.caches.choice import CacheShape
from kernels.caches.places import Places, Slots


class KeyValueCache:
    """Keys and values by layer, and the places of their tokens.

    Args:
        places: where tokens lie.
        leading: sequences, or blocks.
        inner: places in a sequence, or in a block.
    """

    def __init__(self, shape: CacheShape, places: Places, leading: int, inner: int) -> None:
        self.shape = shape
        self.places = places
        size = (leading, shape.num_kv_heads, inner, shape.head_dim)
        dtype = getattr(torch, shape.dtype)
        # Zeros and not whatever was there: a NaN behind the last token would survive a mask.
        self.keys = [
            torch.zeros(size, dtype=dtype, device=places.device) for _ in range(shape.num_layers)
        ]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    @property
    def storage_bytes(self) -> int:
        """Bytes allocated for tokens."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def store(self, layer: int, slots: Slots, k: Tensor, v: Tensor) -> None:
        """Write k, v [..., H_kv, D] of tokens whose slots have the leading shape.

        Raises ValueError, with nothing written, for k or v of another shape.
        """
        first, second = slots
        expected = (*first.shape, self.shape.num_kv_heads, self.shape.head_dim)
        require_shape("k", k, expected)
        require_shape("v", v, expected)
        self.keys[layer][first, :, second] = k
        self.values[layer][first, :, second] = v

    def append(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Write new tokens behind each sequence's last in one layer; lengths stay.

        Raises ValueError, with nothing changed, if a sequence has no room for them, or k or v
        another shape than [B, H_kv, T, D].
        """
        num_tokens = k_BGTD.shape[-2]
        shape = self.shape
        expected = (self.places.batch_size, shape.num_kv_heads, num_tokens, shape.head_dim)
        require_shape("k", k_BGTD, expected)
        require_shape("v", v_BGTD, expected)
        self.places.reserve(num_tokens)
        self.store(
            layer, next_slots(self.places, num_tokens), k_BGTD.transpose(1, 2),
            v_BGTD.transpose(1, 2),
        )  # fmt: skip

    def sequence(self, layer: int, index: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """A copy of one sequence's first tokens, k and v [H_kv, num_tokens, D]."""
        first, second = self.places.of_sequence(index, num_tokens)
        k, v = self.keys[layer][first, :, second], self.values[layer][first, :, second]
        return k.transpose(0, 1), v.transpose(0, 1)

    def clear_behind(self, num_tokens: int) -> None:
        """Zero what forgotten tokens left behind the next ``num_tokens`` of every sequence."""
        slots = self.places.take_left_behind(num_tokens)
        if slots is not None:
            for storage in (*self.keys, *self.values):
                storage[slots[0], :, slots[1]] = 0.0

    def dense(
        self, layer: int, num_tokens: int, forgotten: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The first ``num_tokens`` places of every sequence, k and v [B, H_kv, num_tokens, D].

        Args:
            forgotten: bool [B, num_tokens], places to read as zero; of a paged cache alone, in
                whose blocks there is what other sequences left, or hold.
        """
        keys, values = self.keys[layer], self.values[layer]
        table, size = self.places.block_table, self.places.block_size
        if table is None or size is None:
            return keys[:, :, :num_tokens], values[:, :, :num_tokens]
        blocks = table[:, : -(-num_tokens // size)].long()
        num_heads = self.shape.num_kv_heads
        heads = torch.arange(num_heads, device=blocks.device)
        rows_BGN = blocks[:, None] * num_heads + heads[:, None]
        # [B, G, blocks, size, D]: one copy, which a paged kernel does without.
        k, v = (x.flatten(0, 1)[rows_BGN].flatten(2, 3)[:, :, :num_tokens] for x in (keys, values))
        if forgotten is not None:
            for x in (k, v):
                x.masked_fill_(forgotten[:, None, :, None], 0.0)
        return k, v


def require_shape(name: str, x: Tensor, expected: Sequence[int]) -> None:
    """Raise ValueError for another shape, which an assignment would broadcast if it could."""
    if x.shape != tuple(expected):
        raise ValueError(f"cache: {name} has shape {list(x.shape)}: must be {list(expected)}")


def next_positions(places: Places, num_tokens: int) -> Tensor:
    """Positions [B, T] of the next tokens of every sequence, from the lengths on the device."""
    offsets = torch.arange(num_tokens, device=places.device)
    return places.lengths[:, None] + offsets


def next_slots(places: Places, num_tokens: int) -> Slots:
    """Slots [B, T] of the next tokens of every sequence."""
    positions = next_positions(places, num_tokens).long()
    sequences = torch.arange(places.batch_size, device=places.device)[:, None]
    return places.slots(sequences.expand_as(positions), positions)
