"""The layout of a packed batch whose documents are placed on ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from parallel.context.blocks.layouts import Layout
from parallel.context.documents.placement import place

WHY_NOT_DENSE = (
    "documents are placed in a packed batch; the sequences of a dense one are equally long, and "
    "attention=zigzag splits them evenly"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Documents(Layout):
    """Rank r holds the runs of :func:`parallel.context.documents.placement.place`.

    Up to one token of padding ends a rank's part. Dense batches have no such layout.
    """

    name: ClassVar[str] = "documents"

    @property
    def multiple(self) -> int:
        """One: a document is not padded."""
        return 1

    def runs(self, rank: int, length: int) -> list[range]:
        raise ValueError(WHY_NOT_DENSE)

    def packed_len(self, lengths: Sequence[int]) -> int:
        """Tokens on each rank, padding included."""
        return place(tuple(lengths), self.num_ranks).local_len

    def packed_positions(
        self, lengths: Sequence[int], rank: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Positions of the local tokens in their documents, int64; 0 for padding."""
        runs = place(tuple(lengths), self.num_ranks).parts[rank]
        parts = [torch.arange(run.start, run.stop, device=device) for run in runs]
        positions = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *parts])
        return torch.nn.functional.pad(positions, (0, self.packed_len(lengths) - len(positions)))

    def shard_packed(
        self, x: Tensor, lengths: Sequence[int], rank: int, dim: int = 0, fill: float = 0
    ) -> Tensor:
        """The rank's part of documents that lie end to end along ``dim``; padding is ``fill``."""
        starts = [0, *itertools.accumulate(lengths)]
        runs = place(tuple(lengths), self.num_ranks).parts[rank]
        parts = [x.narrow(dim, starts[run.document] + run.start, run.tokens) for run in runs]
        shape = list(x.shape)
        shape[dim] = self.packed_len(lengths) - sum(run.tokens for run in runs)
        return torch.cat([*parts, x.new_full(shape, fill)], dim)

    def unshard_packed(
        self, shards: Sequence[Tensor], lengths: Sequence[int], dim: int = 0
    ) -> Tensor:
        starts = [0, *itertools.accumulate(lengths)]
        shape = list(shards[0].shape)
        shape[dim] = starts[-1]
        whole = shards[0].new_empty(shape)
        for shard, runs in zip(shards, place(tuple(lengths), self.num_ranks).parts, strict=True):
            local = 0
            for run in runs:
                there = whole.narrow(dim, starts[run.document] + run.start, run.tokens)
                there.copy_(shard.narrow(dim, local, run.tokens))
                local += run.tokens
        return whole
