"""The layout of a mesh of ranks: sequences over groups, and a group's part over its ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from parallel.context.blocks.layouts import Layout


@dataclass(kw_only=True, slots=True, frozen=True)
class Nested(Layout):
    """``outer`` over groups of neighbouring ranks; each cuts its part into contiguous ones.

    Joined in the order of its ranks, a group's parts are one rank's part of ``outer``, which says
    which scores are computed: the ranks of a group compute them in different heads, and have no
    blocks of their own.
    """

    outer: Layout

    name: ClassVar[str] = "nested"

    @property
    def inner_degree(self) -> int:
        """Ranks of a group."""
        return self.num_ranks // self.outer.num_ranks

    @property
    def multiple(self) -> int:
        chunks = self.outer.chunks_per_rank
        return self.outer.num_ranks * math.lcm(chunks, self.inner_degree)

    def runs(self, rank: int, length: int) -> list[range]:
        group, place = divmod(rank, self.inner_degree)
        local = self.local_len(length)
        start, stop = place * local, (place + 1) * local
        found, begin = [], 0
        for run in self.outer.runs(group, self.padded(length)):
            part = run[max(start - begin, 0) : max(stop - begin, 0)]
            if part:
                found.append(part)
            begin += len(run)
        # Of a sequence without tokens one run, as of any other layout.
        return found or [range(0)]


@runtime_checkable
class SplitsGroups(Protocol):
    """A scheme whose ranks form groups, each with one rank's part of an outer layout."""

    def group_layout(self, num_ranks: int) -> Layout:
        """The layout over the groups of ``num_ranks`` ranks; scores are computed by its blocks."""
        ...
