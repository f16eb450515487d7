"""Windows of documents laid end to end: a placement that is always found.

Ranks are filled one after another, all but the last. What is left of the batch is laid end to end
in some order, as a circle; the next rank takes a window of its share of tokens. A window reaches
over whole documents and cuts at most two. Moved along the circle, its pairs are a piecewise linear
function of its place, and their mean over all places is the rank's fair share, so some window has
that share, to a token's pairs. Of all that have it, or begin or end between documents and miss it
by no more than allowed, the one whose cuts cost the fewest keys is taken. A single document comes
out in shells, an early and a late chunk for each rank, which is what zigzag does.

The order decides which cuts are needed: by length, long beside short, or at random.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from parallel.context.documents.runs import Run, keys_received


def fill(
    rest: Sequence[list[Run]],
    num_ranks: int,
    band: tuple[int, int],
    order: int,
    limit: int | None = None,
) -> list[list[Run]] | None:
    """The runs of each rank, with the ``order``-th way to lay documents end to end.

    Args:
        rest: the runs of each document, ascending.
        band: the least and the most pairs of a rank.
        limit: received keys from which on the result is of no interest, and None.
    """
    tokens = sum(run.tokens for runs in rest for run in runs)
    pairs = sum(run.pairs for runs in rest for run in runs)
    least, most = band
    draw = random.Random(order)
    found: list[list[Run]] = []
    received = 0
    for rank in range(num_ranks - 1):
        share = -(-tokens // (num_ranks - rank))
        if not share:
            found.append([])
            continue
        # Not so far from the mean that later ranks could not stay near it.
        later = num_ranks - rank - 1
        near = max(least, pairs - later * most), min(most, pairs - later * least)
        circle = _Circle(_in_order(rest, order, draw))
        taken = circle.best_window(share, pairs * share // tokens, near)
        rest = _without(rest, taken)
        tokens -= share
        pairs -= sum(run.pairs for run in taken)
        found.append(taken)
        received += keys_received(taken)
        if limit is not None and received >= limit:
            return None
    return [*found, [run for runs in rest for run in runs]]


def _in_order(rest: Sequence[list[Run]], order: int, draw: random.Random) -> list[Run]:
    """What is left of the documents, end to end."""
    by_length = sorted(rest, key=lambda runs: (-sum(run.tokens for run in runs), runs[0].document))
    if order == 1:
        longer, shorter = by_length[: -(-len(rest) // 2)], by_length[-(-len(rest) // 2) :]
        pairs = itertools.zip_longest(longer, reversed(shorter))
        by_length = [runs for pair in pairs for runs in pair if runs is not None]
    elif order > 1:
        draw.shuffle(by_length)
    return [run for runs in by_length for run in runs]


def _without(rest: Sequence[list[Run]], taken: Iterable[Run]) -> list[list[Run]]:
    cuts = defaultdict(list)
    for run in taken:
        cuts[run.document].append(run)
    found: list[list[Run]] = []
    for runs in rest:
        left = runs
        for cut in cuts.get(runs[0].document, ()):
            left = [
                Run(run.document, start, stop)
                for run in left
                for start, stop in (
                    (run.start, min(run.stop, cut.start)),
                    (max(run.start, cut.stop), run.stop),
                )
                if start < stop
            ]
        if left:
            found.append(left)
    return found


class _Circle:
    """Runs end to end, the last one before the first, and windows on them."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._starts = [0, *itertools.accumulate(run.tokens for run in runs)]
        self._pairs = [0, *itertools.accumulate(run.pairs for run in runs)]

    def best_window(self, size: int, wanted: int, band: tuple[int, int]) -> list[Run]:
        """Runs of ``size`` tokens in all, with ``wanted`` pairs or between those of the band."""
        total, starts = self._starts[-1], self._starts[:-1]
        places = sorted({*starts, *((start - size) % total for start in starts)})
        found = [self._pairs_before(at + size) - self._pairs_before(at) for at in places]
        candidates = [
            at for at, pairs in zip(places, found, strict=True) if band[0] <= pairs <= band[1]
        ]
        ring = zip(
            places, [*places[1:], places[0] + total], found, [*found[1:], found[0]], strict=True
        )
        for at, next_at, pairs, next_pairs in ring:
            if (pairs - wanted) * (next_pairs - wanted) <= 0 and pairs != next_pairs:
                # Linear between two neighbouring places.
                step = (next_at - at) * (wanted - pairs)
                candidates.append((at + _nearest(step, next_pairs - pairs)) % total)
        if not candidates:
            # All places have equally many.
            candidates = places
        return self._window(min(candidates, key=lambda at: (self._cost(at, size), at)), size)

    def _pairs_before(self, place: int) -> int:
        """Pairs of the tokens before a place, which may lie one round further."""
        before = 0
        if place >= self._starts[-1]:
            place -= self._starts[-1]
            before = self._pairs[-1]
        index = bisect.bisect_right(self._starts, place) - 1
        inside = place - self._starts[index]
        before += self._pairs[index]
        if not inside:
            return before
        # Each of these tokens has its position and one more.
        return before + inside * (2 * self._runs[index].start + inside + 1) // 2

    def _cost(self, place: int, size: int) -> int:
        """Keys that more are received if a window's ends cut documents.

        A cut at a position makes the rank that has what follows receive all keys before it. Where
        both ends cut one document, one rank has the middle and the other both sides of it, and
        only the keys before the later cut are received.
        """
        first_document, first = self._cut(place)
        last_document, last = self._cut((place + size) % self._starts[-1])
        return max(first, last) if first_document == last_document else first + last

    def _cut(self, place: int) -> tuple[int, int]:
        """The document at a place, and the position of a cut there; 0 between two runs."""
        index = bisect.bisect_right(self._starts, place) - 1
        run, inside = self._runs[index], place - self._starts[index]
        return run.document, run.start + inside if inside else 0

    def _window(self, place: int, size: int) -> list[Run]:
        index = bisect.bisect_right(self._starts, place) - 1
        offset = place - self._starts[index]
        found = []
        while size:
            run = self._runs[index % len(self._runs)]
            start = run.start + offset
            found.append(Run(run.document, start, min(run.stop, start + size)))
            size -= found[-1].tokens
            offset, index = 0, index + 1
        return found


def _nearest(numerator: int, denominator: int) -> int:
    """The integer nearest to a fraction."""
    return (2 * numerator + denominator) // (2 * denominator)
