"""Which keys a rank needs from which rank, and where they arrive.

Rows are tokens of local tensors. A rank's *waiting* runs are those whose queries see keys of
their document outside the run. It asks for the keys that they see, its own ones among them, which
it sends to itself: so all of them arrive in one tensor, sorted by rank, document and position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.context.documents.placement import Placement, Run


class Segment(NamedTuple):
    """Keys of one document that lie side by side on their owner."""

    document: int
    start: int
    stop: int
    """Positions in the document."""
    row: int
    """The first one's row: on its owner, or among those that arrive."""

    @property
    def rows(self) -> range:
        return range(self.row, self.row + self.stop - self.start)


def num_local_runs(placement: Placement, rank: int, causal: bool) -> int:
    """Runs of ``rank`` that need no key outside the run; they are its first ones."""
    return sum(
        run.start == 0 if causal else placement.is_whole(run) for run in placement.parts[rank]
    )


def waiting_runs(placement: Placement, rank: int, causal: bool) -> tuple[Run, ...]:
    """Runs of ``rank`` that need keys outside the run."""
    return placement.parts[rank][num_local_runs(placement, rank, causal) :]


def needed(
    placement: Placement, rank: int, causal: bool, *, diagonals: bool = True
) -> dict[int, int]:
    """For each document of a waiting run, how many of its first keys ``rank`` asks for.

    Args:
        diagonals: whether those of the run itself are among them; other ranks send the same
            in either case.
    """
    found: dict[int, int] = {}
    for run in waiting_runs(placement, rank, causal):
        stop = placement.lengths[run.document]
        if causal:
            stop = run.stop if diagonals else run.start
        found[run.document] = max(stop, found.get(run.document, 0))
    return found


@dataclass(kw_only=True, slots=True, frozen=True)
class Routes:
    """All rows that travel under one placement and mask."""

    placement: Placement
    causal: bool
    held: Sequence[dict[int, list[Segment]]]
    """The keys that each rank holds, by document."""

    @classmethod
    def of(cls, placement: Placement, causal: bool) -> Routes:
        held = []
        for part in placement.parts:
            segments: dict[int, list[Segment]] = {}
            row = 0
            for run in part:
                segments.setdefault(run.document, []).append(Segment(*run, row))
                row += run.tokens
            for found in segments.values():
                found.sort()
            held.append(segments)
        return cls(placement=placement, causal=causal, held=held)

    def sent(self, source: int, to: int, *, diagonals: bool = True) -> list[Segment]:
        """The rows of ``source`` that rank ``to`` asks for, in the order in which they arrive."""
        asked = needed(self.placement, to, self.causal, diagonals=diagonals)
        return [
            segment._replace(stop=min(segment.stop, asked[document]))
            for document in sorted(asked)
            for segment in self.held[source].get(document, ())
            if segment.start < asked[document]
        ]

    def received(self, rank: int) -> int:
        """Rows that ``rank`` receives from others."""
        return sum(
            segment.stop - segment.start
            for source in range(self.placement.num_ranks)
            if source != rank
            for segment in self.sent(source, rank)
        )

    def sends(self, rank: int) -> int:
        """Rows that others receive from ``rank``, once for each of them."""
        return sum(
            segment.stop - segment.start
            for to in range(self.placement.num_ranks)
            if to != rank
            for segment in self.sent(rank, to)
        )

    def travels(self) -> bool:
        """Whether any rank needs keys of another one."""
        return any(
            waiting_runs(self.placement, rank, self.causal)
            for rank in range(self.placement.num_ranks)
        )

    def keeps_keys(self) -> bool:
        """Whether no rank receives more rows than it holds.

        Then keeping them from the forward to the backward pass costs at most as much memory as
        the rank's own keys, and they need not come again.
        """
        ranks = range(self.placement.num_ranks)
        return max(map(self.received, ranks)) <= self.placement.local_len


def arrivals(by_source: Sequence[Sequence[Segment]]) -> dict[int, list[Segment]]:
    """Where keys arrive, by document and in the order of their positions."""
    found: dict[int, list[Segment]] = {}
    row = 0
    for segments in by_source:
        for segment in segments:
            found.setdefault(segment.document, []).append(segment._replace(row=row))
            row += segment.stop - segment.start
    for there in found.values():
        there.sort()
    return found


def rows_up_to(there: Sequence[Segment], stop: int) -> Iterator[range]:
    """The rows of a document's first ``stop`` keys, in the order of their positions."""
    for segment in there:
        if segment.start < stop:
            yield segment._replace(stop=min(segment.stop, stop)).rows
