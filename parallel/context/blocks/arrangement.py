"""Where the keys of all ranks lie in one tensor, and which of them a rank reads.

Keys that are gathered lie in the order of their positions in a dense batch, and one rank's after
another's in a packed one. All ranks compute the same :class:`Arrangement` from the layout and the
mask: so a rank fetches no keys that its queries do not see, and the owner of keys asks no rank for
gradients of which it has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Sums = tuple[tuple[range, tuple[tuple[int, range], ...]], ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class Arrangement:
    """Rows of tokens as ranges: of a rank's own, and of the tensor that has those of all ranks."""

    dim: int
    """The dimension of tokens."""
    num_rows: int
    """The rows of all ranks."""
    places: tuple[tuple[tuple[range, range], ...], ...]
    """By rank, its rows and where they lie among those of all."""
    seen: tuple[tuple[range, ...], ...]
    """By rank, the rows of all that its calls read: disjoint and in order."""
    sums: Sums | None
    """This rank's rows of :attr:`seen`, in disjoint ranges, each with the calls that read it, two
    at most: their numbers, and which of their keys these are. None where calls take rows by index,
    or more than two of them the same row."""

    def moves(self, source: int, reader: int) -> list[tuple[range, range]]:
        """The rows of ``source`` that ``reader`` reads, and where they lie among those of all."""
        found = []
        for own, place in self.places[source]:
            for rows in self.seen[reader]:
                part = range(max(place.start, rows.start), min(place.stop, rows.stop))
                if part:
                    start = own.start + part.start - place.start
                    found.append((range(start, start + len(part)), part))
        return found


def sums_of(parts: Sequence[slice]) -> Sums | None:
    """:attr:`Arrangement.sums` of calls that read a slice of the rows each."""
    bounds = sorted({bound for part in parts for bound in (part.start, part.stop)})
    found = []
    for start, stop in itertools.pairwise(bounds):
        readers = tuple(
            (number, range(start - part.start, stop - part.start))
            for number, part in enumerate(parts)
            if part.start <= start and stop <= part.stop
        )
        if len(readers) > 2:
            return None
        if readers:
            found.append((range(start, stop), readers))
    return tuple(found)


def joined(parts: Sequence[range]) -> list[range]:
    """The same rows in as few ranges as there are, in order."""
    found: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if found and part.start == found[-1].stop:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return found
