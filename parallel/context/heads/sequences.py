"""Parts of sequences, joined to whole ones and cut again, for tensors that hold some heads.

Between ranks, heads come first: rows of shape [heads, ...], of which any number can be sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallel.context.blocks.layouts import Layout

HEAD_DIM = 1
"""The dimension of heads in [B, H, S, D] and in [T, H, D]."""


class Sequences(Protocol):
    """How a batch's tensors hold heads and tokens."""

    def join(self, parts: Tensor) -> Tensor:
        """Rows of all ranks [P, heads, ...] -> whole sequences, without padding between them."""
        ...

    def cut(self, whole: Tensor) -> Tensor:
        """The inverse of :meth:`join`, not contiguous; padding is zero."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class DenseSequences:
    """[B, H, S, D], each rank with contiguous positions; padding at the end stays.

    A causal mask hides the padding, and without a mask there is none.
    """

    num_ranks: int

    def join(self, parts: Tensor) -> Tensor:
        return parts.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def cut(self, whole: Tensor) -> Tensor:
        return whole.unflatten(2, (self.num_ranks, -1)).permute(2, 1, 0, 3, 4)


class PackedSequences:
    """[T, H, D], each sequence split by the layout alone.

    Args:
        lengths: real tokens of each whole sequence.
    """

    def __init__(self, layout: Layout, lengths: Sequence[int], device: torch.device) -> None:
        self._num_ranks = layout.num_ranks
        local = [layout.local_len(length) for length in lengths]
        self._num_local = sum(local)
        starts = [0, *itertools.accumulate(local)]
        found = []
        for start, size, length in zip(starts, local, lengths, strict=False):
            places = [
                torch.arange(start, start + size) + rank * self._num_local
                for rank in range(layout.num_ranks)
            ]
            found.append(layout.unshard(places, dim=0, length=length))
        self._places = torch.cat(found).to(device)

    def join(self, parts: Tensor) -> Tensor:
        return parts.transpose(1, 2).flatten(0, 1).index_select(0, self._places)

    def cut(self, whole: Tensor) -> Tensor:
        every = whole.new_zeros((self._num_ranks * self._num_local, *whole.shape[1:]))
        every.index_copy_(0, self._places, whole)
        return every.unflatten(0, (self._num_ranks, -1)).transpose(1, 2)
