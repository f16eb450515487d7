"""Parts of sequences, joined to whole ones and cut again, for tensors that hold some heads.

Messages between ranks have heads first: rows of shape [heads, ...], of which any number can be
sent. Where ranks read each other's memory, a part is copied from the rank that holds it to its
place between the others', and results are staged where each rank finds its own part of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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

    def landing(self, like: Tensor, num_heads: int) -> torch.Size:
        """The shape in which parts like ``like``, of these heads, of all ranks land here."""
        ...

    def places(self, landing: Tensor, part: Tensor, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Views that a copy brings what ``rank`` holds to its place: (into, out)."""
        ...

    def landed(self, landing: Tensor) -> Tensor:
        """Whole sequences, as those of :meth:`join`, when all parts are in their places."""
        ...

    def staging(self, like: Tensor, num_heads: int) -> torch.Size:
        """The shape in which whole sequences of these heads are staged for other ranks."""
        ...

    def stage(self, whole: Tensor, staged: Tensor) -> None:
        """Write whole sequences where other ranks read them; padding is zero."""
        ...

    def part(self, staged: Tensor, rank: int) -> Tensor:
        """The view of the part that ``rank`` holds, in the form of its own tensors."""
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

    def landing(self, like: Tensor, num_heads: int) -> torch.Size:
        batch_size, _, local_len, head_dim = like.shape
        return torch.Size((batch_size, num_heads, self.num_ranks * local_len, head_dim))

    def places(self, landing: Tensor, part: Tensor, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.part(landing, rank), part

    def landed(self, landing: Tensor) -> Tensor:
        return landing

    def staging(self, like: Tensor, num_heads: int) -> torch.Size:
        return self.landing(like, num_heads)

    def stage(self, whole: Tensor, staged: Tensor) -> None:
        staged.copy_(whole)

    def part(self, staged: Tensor, rank: int) -> Tensor:
        local_len = staged.shape[2] // self.num_ranks
        return staged.narrow(2, rank * local_len, local_len)


_MOST_RUNS = 8
"""Runs of one rank's tokens that are copied to their places one by one. Of more, all tokens land
as they come, and one kernel sorts them, sooner than so many copies have started."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Run:
    """Tokens of one rank that lie side by side in its part and in the whole batch."""

    local_start: int
    whole_start: int
    length: int


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
        places = torch.cat(found)
        self._places = places.to(device)
        self._num_real = len(places)
        self._runs = self._sorted_by_rank(places)
        """For each rank, where its tokens go; none if there are too many runs."""

    def _sorted_by_rank(self, places: Tensor) -> list[list[_Run]]:
        if not len(places):
            return []
        ranks, local = places // self._num_local, places % self._num_local
        breaks = (places.diff() != 1) | (ranks.diff() != 0)
        starts = [0, *(breaks.nonzero().flatten() + 1).tolist()]
        found: list[list[_Run]] = [[] for _ in range(self._num_ranks)]
        for start, stop in itertools.pairwise([*starts, len(places)]):
            run = _Run(local_start=int(local[start]), whole_start=start, length=stop - start)
            found[int(ranks[start])].append(run)
        return found if max(map(len, found)) <= _MOST_RUNS else []

    def join(self, parts: Tensor) -> Tensor:
        return parts.transpose(1, 2).flatten(0, 1).index_select(0, self._places)

    def cut(self, whole: Tensor) -> Tensor:
        every = whole.new_zeros((self._num_ranks * self._num_local, *whole.shape[1:]))
        every.index_copy_(0, self._places, whole)
        return every.unflatten(0, (self._num_ranks, -1)).transpose(1, 2)

    def landing(self, like: Tensor, num_heads: int) -> torch.Size:
        tokens = (self._num_real,) if self._runs else (self._num_ranks, self._num_local)
        return torch.Size((*tokens, num_heads, like.shape[-1]))

    def places(self, landing: Tensor, part: Tensor, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        if not self._runs:
            yield landing[rank], part
            return
        for run in self._runs[rank]:
            yield (
                landing.narrow(0, run.whole_start, run.length),
                part.narrow(0, run.local_start, run.length),
            )

    def landed(self, landing: Tensor) -> Tensor:
        return landing if self._runs else landing.flatten(0, 1).index_select(0, self._places)

    def staging(self, like: Tensor, num_heads: int) -> torch.Size:
        return torch.Size((self._num_ranks, self._num_local, num_heads, like.shape[-1]))

    def stage(self, whole: Tensor, staged: Tensor) -> None:
        if self._num_real < self._num_ranks * self._num_local:
            staged.zero_()
        staged.flatten(0, 1).index_copy_(0, self._places, whole)

    def part(self, staged: Tensor, rank: int) -> Tensor:
        return staged[rank]
