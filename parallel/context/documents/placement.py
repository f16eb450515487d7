"""Placement of a packed batch's documents on ranks: equal tokens, equal work, few keys to send.

Under a causal mask a token at position p attends to p + 1 keys. Each rank gets as many tokens as
any other, and close to the mean number of query-key pairs, but documents stay whole where they
can: only a run of tokens whose document begins on another rank needs keys from there.

Ranks are filled one after another, all but the last. What is left of the batch is laid end to end
in some order, as a circle; the next rank takes a window of its share of tokens. A window reaches
over whole documents and cuts at most two. Moved along the circle, its pairs are a piecewise linear
function of its place, and their mean over all places is the rank's fair share, so some window has
that share, to a token's pairs. Of all that have it, or begin or end between documents and miss it
by at most :data:`TOLERANCE`, the one whose cuts cost the fewest keys is taken. A single document
comes out in shells, an early and a late chunk for each rank, which is what zigzag does.

The order decides which cuts are needed, so a few are tried and the best placement is kept: by
length, long beside short, and random ones while there is time. Other ways to the same end: WLB-LLM
(Wang et al. 2025) splits each document over all ranks, or none; ByteScale (Ge et al. 2025) and
FlexSP (Wang et al. 2025) give long sequences more ranks; MagiAttention deals out chunks of equal
size by their work. Everything is computed in integers, so that all ranks find the same placement.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TOLERANCE = 0.01
"""Pairs that a rank may have above or below the mean, as a share of it."""

_TRIED_STEPS = 1024
"""Orders are tried until documents x ranks x orders reach this; two are tried in any case."""

_MOST_ORDERS = 16

_PLACEMENTS_KEPT = 64
"""A training run packs each batch anew; its layers and passes share one placement."""


class Run(NamedTuple):
    """Consecutive tokens of one document: positions ``start`` up to ``stop``."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def pairs(self) -> int:
        """Query-key pairs that a causal mask keeps for these queries."""
        return pairs_up_to(self.stop) - pairs_up_to(self.start)


def pairs_up_to(stop: int) -> int:
    """Causal pairs of the first ``stop`` tokens of a document."""
    return stop * (stop + 1) // 2


@dataclass(kw_only=True, slots=True, frozen=True)
class Placement:
    """Which runs of which documents each rank holds."""

    lengths: tuple[int, ...]
    """Tokens of each document."""
    parts: tuple[tuple[Run, ...], ...]
    """The runs of each rank in the order of its local tokens.

    Whole documents come first, then beginnings of documents, then other runs, of several of one
    document the first before the second: what attends to a rank's own keys alone is one slice of
    its tokens under any mask, and so is what does not.
    """

    @property
    def num_ranks(self) -> int:
        return len(self.parts)

    @property
    def local_len(self) -> int:
        """Tokens on each rank; up to one of them, the last, is padding."""
        return -(-sum(self.lengths) // self.num_ranks)

    def tokens(self, rank: int) -> int:
        """Tokens of ``rank`` without padding."""
        return sum(run.tokens for run in self.parts[rank])

    def pairs(self, rank: int) -> int:
        """Causal query-key pairs that ``rank`` computes."""
        return sum(run.pairs for run in self.parts[rank])

    def is_whole(self, run: Run) -> bool:
        return run.start == 0 and run.stop == self.lengths[run.document]

    def ends(self, rank: int) -> dict[int, int]:
        """For each document of which ``rank`` has tokens, the position after its last one."""
        found: dict[int, int] = {}
        for run in self.parts[rank]:
            found[run.document] = max(run.stop, found.get(run.document, 0))
        return found

    def received(self, rank: int) -> int:
        """Keys of other ranks that the queries of ``rank`` see under a causal mask."""
        return sum(self.ends(rank).values()) - self.tokens(rank)


def least_received(placement: Placement) -> int:
    """Keys that ranks must receive, together, in any placement as balanced as this one.

    With no more tokens on any rank than L and no more pairs than C, the most in this placement,
    take a document of n tokens, and the positions e_1 = n >= e_2 >= ... after the last of its
    tokens on each rank that has some. A rank needs all keys before e_i and owns some: all ranks
    together receive sum(e_i) - n = e_2 + e_3 + ... Tokens at e_{j+1} and beyond are on j ranks, so
    that there are at most j L of them with at most j C pairs. That bounds each e_{j+1} from below:

        n - e <= j L    and    n (n + 1) / 2 - e (e + 1) / 2 <= j C.

    Documents are bounded one by one, as if each had all ranks to itself; a batch of several cannot
    always reach the sum.
    """
    ranks = range(placement.num_ranks)
    most_tokens = max(map(placement.tokens, ranks))
    most_pairs = max(map(placement.pairs, ranks))
    total = 0
    for length in placement.lengths:
        for j in itertools.count(1):
            end = max(
                length - j * most_tokens,
                _least_stop(pairs_up_to(length) - j * most_pairs),
            )
            if end <= 0:
                break
            total += end
    return total


def _least_stop(pairs: int) -> int:
    """The least number of tokens with so many causal pairs."""
    low, high = 0, 1
    while pairs_up_to(high) < pairs:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pairs_up_to(middle) >= pairs else (middle + 1, high)
    return low


@functools.lru_cache(maxsize=_PLACEMENTS_KEPT)
def place(lengths: tuple[int, ...], num_ranks: int) -> Placement:
    """Place documents of these lengths, of which some may be empty.

    Tokens differ by at most one between ranks. Pairs differ from the mean by at most
    :data:`TOLERANCE` of it and the pairs of one token, which is at most the longest document.
    """
    documents = sum(length > 0 for length in lengths)
    steps = max(1, documents * num_ranks)
    num_orders = min(_MOST_ORDERS, max(2, _TRIED_STEPS // steps))
    if documents < 2 or num_ranks < 2:
        num_orders = 1
    tried = (_arranged(lengths, _filled(lengths, num_ranks, order)) for order in range(num_orders))
    return min(tried, key=_all_received)


def _all_received(placement: Placement) -> int:
    return sum(map(placement.received, range(placement.num_ranks)))


def _arranged(lengths: tuple[int, ...], parts: Iterable[Iterable[Run]]) -> Placement:
    """The placement, with each rank's runs joined where they touch and in local order."""
    found: list[tuple[Run, ...]] = []
    for part in parts:
        joined: list[Run] = []
        for run in sorted(part):
            last = joined[-1] if joined else None
            if last and last.document == run.document and last.stop == run.start:
                joined[-1] = Run(run.document, last.start, run.stop)
            else:
                joined.append(run)
        keyed = []
        seen: dict[int, int] = defaultdict(int)
        for run in joined:
            place_in_document = seen[run.document]
            seen[run.document] += 1
            kind = 0 if run.tokens == lengths[run.document] else 1 if run.start == 0 else 2
            keyed.append((kind, place_in_document, run))
        found.append(tuple(run for _, _, run in sorted(keyed)))
    return Placement(lengths=lengths, parts=tuple(found))


def _filled(lengths: tuple[int, ...], num_ranks: int, order: int) -> list[list[Run]]:
    """The runs of each rank, with the ``order``-th way to lay documents end to end."""
    rest = [[Run(document, 0, length)] for document, length in enumerate(lengths) if length]
    tokens, pairs = sum(lengths), sum(map(pairs_up_to, lengths))
    slack = int(TOLERANCE * pairs / num_ranks)
    least, most = pairs // num_ranks - slack, pairs // num_ranks + slack
    draw = random.Random(order)
    found: list[list[Run]] = []
    for rank in range(num_ranks - 1):
        share = -(-tokens // (num_ranks - rank))
        if not share:
            found.append([])
            continue
        # Not so far from the mean that later ranks could not stay near it.
        later = num_ranks - rank - 1
        band = max(least, pairs - later * most), min(most, pairs - later * least)
        circle = _Circle(_in_order(rest, order, draw))
        taken = circle.best_window(share, pairs * share // tokens, band)
        rest = _without(rest, taken)
        tokens -= share
        pairs -= sum(run.pairs for run in taken)
        found.append(taken)
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
