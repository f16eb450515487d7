"""Which heads each rank attends with.

Query heads are cut into as equal, contiguous ranges as their number allows. A rank needs the key
heads that its query heads read: with fewer key heads than ranks several ranks need the same one,
and where a range ends inside a group of query heads, two neighbours do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable


@dataclass(kw_only=True, slots=True, frozen=True)
class Piece:
    """Heads for one kernel call, equally many of q to each of k, as indices of the rank's own."""

    q: slice
    kv: slice


@dataclass(kw_only=True, slots=True, frozen=True)
class HeadSplit:
    """Heads over ``num_ranks`` ranks; ``num_kv_heads`` divides ``num_heads``."""

    num_ranks: int
    num_heads: int
    num_kv_heads: int

    @property
    def group_size(self) -> int:
        """Query heads that read one key head."""
        return self.num_heads // self.num_kv_heads

    def q_heads(self, rank: int) -> range:
        """Query heads of ``rank``."""
        first, last = (self.num_heads * r // self.num_ranks for r in (rank, rank + 1))
        return range(first, last)

    def kv_heads(self, rank: int) -> range:
        """Key heads that these read."""
        heads = self.q_heads(rank)
        return range(heads.start // self.group_size, (heads.stop - 1) // self.group_size + 1)

    @property
    def shares_kv_heads(self) -> bool:
        """Whether two ranks have a key head in common, so that its gradients are summed."""
        return sum(len(self.kv_heads(rank)) for rank in range(self.num_ranks)) > self.num_kv_heads

    def in_groups(self, num_groups: int) -> HeadSplit:
        """The heads of every rank, split again: group g of rank r is number r * num_groups + g."""
        return replace(self, num_ranks=self.num_ranks * num_groups)

    def why_not_groups(self, num_groups: int) -> str | None:
        """None if every rank has a head for each group, else the reason in one line."""
        if self.num_heads >= self.num_ranks * num_groups:
            return None
        return (
            f"attention.head_groups={num_groups}: {self.num_heads} query heads on "
            f"{self.num_ranks} ranks make at most {self.num_heads // self.num_ranks}"
        )

    @property
    def imbalance(self) -> float:
        """Query heads of the busiest rank over the mean, and so its FLOPs, under any mask."""
        busiest = max(len(self.q_heads(rank)) for rank in range(self.num_ranks))
        return busiest * self.num_ranks / self.num_heads

    def pieces(self, rank: int) -> list[Piece]:
        """The kernel calls of ``rank``: whole groups of query heads in one, parts in their own."""
        own, size = self.q_heads(rank), self.group_size
        first_kv = self.kv_heads(rank).start
        found, start = [], own.start
        while start < own.stop:
            whole_groups = (own.stop - start) // size if start % size == 0 else 0
            stop = start + whole_groups * size if whole_groups else _end_of_group(start, size)
            stop = min(stop, own.stop)
            found.append(
                Piece(
                    q=slice(start - own.start, stop - own.start),
                    kv=slice(start // size - first_kv, (stop - 1) // size + 1 - first_kv),
                )
            )
            start = stop
        return found


@runtime_checkable
class SplitsHeads(Protocol):
    """A scheme whose ranks attend to whole sequences in some of the heads each."""

    def head_split(self, num_ranks: int, num_heads: int, num_kv_heads: int) -> HeadSplit:
        """The heads of each rank."""
        ...


def shapes_of_pieces(split: HeadSplit) -> list[tuple[int, int]]:
    """Numbers of query and key heads of all kernel calls, each once; the most heads first."""
    shapes = {
        (piece.q.stop - piece.q.start, piece.kv.stop - piece.kv.start)
        for rank in range(split.num_ranks)
        for piece in split.pieces(rank)
    }
    return sorted(shapes, reverse=True)


def _end_of_group(head: int, size: int) -> int:
    return (head // size + 1) * size
