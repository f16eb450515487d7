"""Which keys a rank needs from which rank, and where they arrive.

Rows are tokens of local tensors. A rank's *waiting* runs are those whose queries see keys of
their document outside the run. It asks for the keys that they see. Those of its own do not travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.context.documents.placement import Placement
from parallel.context.documents.runs import Run


class Segment(NamedTuple):
    """Keys of one document that lie side by side on their owner."""

    document: int
    start: int
    stop: int
    """Positions in the document."""
    row: int
    """The first one's row: on its owner, or in the tensor that the second call reads."""

    @property
    def rows(self) -> range:
        return range(self.row, self.row + self.stop - self.start)

    def between(self, start: int, stop: int) -> Segment | None:
        """The part of it at these positions; None if it has none of them."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        return Segment(self.document, first, last, self.row + first - self.start)


Ranges = list[tuple[int, int]]
"""Positions from one up to another, disjoint and ascending."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Routes:
    """All rows that travel under one placement and mask."""

    placement: Placement
    causal: bool
    held: Sequence[dict[int, list[Segment]]]
    """The keys that each rank holds, by document."""
    window: int | None = None
    """Of :class:`kernels.problem.Mask`, with a causal mask, like ``prefix_len``."""
    prefix_len: int = 0

    @classmethod
    def of(
        cls, placement: Placement, causal: bool, window: int | None = None, prefix_len: int = 0
    ) -> Routes:
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
        return cls(
            placement=placement, causal=causal, held=held, window=window, prefix_len=prefix_len
        )

    @property
    def is_plain(self) -> bool:
        """Whether the mask is a causal one or none."""
        return self.window is None and not self.prefix_len

    def keys(self, run: Run, *, diagonals: bool = True) -> tuple[int, int]:
        """The keys of its document from the first to the last that a run's queries see.

        Args:
            diagonals: whether those of the run itself are among them; without them no more than a
                causal mask is known.
        """
        length = self.placement.lengths[run.document]
        if not self.causal:
            return 0, length
        assert diagonals or self.is_plain, "a window or a prefix cuts through diagonals"
        start = 0 if self.window is None else max(0, run.start - self.window + 1)
        stop = max(run.stop, min(self.prefix_len, length)) if diagonals else run.start
        return start, stop

    def num_local_runs(self, rank: int) -> int:
        """Runs of ``rank``, from the first on, that need no key outside the run."""
        runs = self.placement.parts[rank]
        alone = itertools.takewhile(lambda run: self.keys(run) == (run.start, run.stop), runs)
        return sum(1 for _ in alone)

    def waiting_runs(self, rank: int) -> tuple[Run, ...]:
        """The other runs of ``rank``."""
        return self.placement.parts[rank][self.num_local_runs(rank) :]

    def needed(self, rank: int, *, diagonals: bool = True) -> dict[int, Ranges]:
        """For each document of a waiting run, the keys that ``rank`` asks for.

        Args:
            diagonals: as of :meth:`keys`; other ranks send the same in either case.
        """
        found: dict[int, Ranges] = {}
        for run in self.waiting_runs(rank):
            keys = self.keys(run, diagonals=diagonals)
            found.setdefault(run.document, []).append(keys)
        return {document: _joined(ranges) for document, ranges in found.items()}

    def sent(self, source: int, to: int, *, diagonals: bool = True) -> list[Segment]:
        """The rows of ``source`` that rank ``to`` asks for, by document and position."""
        return list(self._held_of(source, self.needed(to, diagonals=diagonals)))

    def _held_of(self, source: int, asked: dict[int, Ranges]) -> Iterator[Segment]:
        """The rows of ``source`` among these keys."""
        for document in sorted(asked):
            for segment in self.held[source].get(document, ()):
                for start, stop in asked[document]:
                    part = segment.between(start, stop)
                    if part is not None:
                        yield part

    def counts(self) -> list[list[int]]:
        """Rows that each rank sends to each, [source][to]; none to itself."""
        ranks = range(self.placement.num_ranks)
        asked = [self.needed(to) for to in ranks]
        return [
            [
                sum(len(part.rows) for part in self._held_of(source, asked[to]))
                if source != to
                else 0
                for to in ranks
            ]
            for source in ranks
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
        return any(self.waiting_runs(rank) for rank in range(self.placement.num_ranks))

    def keeps_keys(self) -> bool:
        """Whether no rank receives more rows than it holds.

        Then keeping them from the forward to the backward pass costs at most as much memory as
        the rank's own keys, and they need not come again.
        """
        return max(map(sum, zip(*self.counts(), strict=True))) <= self.placement.local_len


def end_to_end(parts: Sequence[Sequence[Segment]]) -> dict[int, list[Segment]]:
    """Where keys are if these lie end to end, by document and in the order of their positions."""
    found: dict[int, list[Segment]] = {}
    row = 0
    for segments in parts:
        for segment in segments:
            found.setdefault(segment.document, []).append(segment._replace(row=row))
            row += segment.stop - segment.start
    for there in found.values():
        there.sort()
    return found


def rows_between(there: Sequence[Segment], start: int, stop: int) -> Iterator[range]:
    """The rows of a document's keys [start, stop), in the order of their positions."""
    for segment in there:
        part = segment.between(start, stop)
        if part is not None:
            yield part.rows


def _joined(ranges: Ranges) -> Ranges:
    """The same positions in disjoint ranges."""
    found: Ranges = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
