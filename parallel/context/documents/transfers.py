"""Exchanges of tokens between ranks that own whole documents, until all have their shares.

Ranks are settled one after another: a rank gives all that it has too much to one other rank, and
takes from it what it lacks. A beam search chooses who settles with whom. Of two ranks one gives
heavy tokens, a window of one document, and the other one light tokens, beginnings of documents. A
window that ends at e costs e keys, as its new owner needs all keys before e, and a beginning of x
tokens costs x; :func:`parallel.context.documents.owners.exchanged` is the same in closed form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from parallel.context.documents import windows
from parallel.context.documents.owners import exchanged
from parallel.context.documents.runs import Run, pairs_up_to

Spans = tuple[tuple[int, int], ...]
"""Positions of one document that one rank has, ascending, as starts and stops."""

Held = dict[int, Spans]
"""What one rank has of each document."""

_MOST_BEGINNINGS = 4
"""Documents whose beginnings are given at once: more have fewer pairs, but are more runs."""

_MOST_HEAVY = 4
"""Documents from which a heavy window is tried, the longest."""

_MOST_SETTLED = 2
"""Ranks that may be the next to settle, those that are furthest from their shares."""


class _Piece(NamedTuple):
    """Of the tokens that ``source`` has of a document, those from ``first`` up to ``last``."""

    document: int
    source: int
    to: int
    first: int
    last: int


class _Exchange(NamedTuple):
    keys: int
    """The change of received keys."""
    pairs: int
    """Pairs that the rank whose surplus it is gives, less those that it takes."""
    pieces: tuple[_Piece, ...]


class _Surplus(NamedTuple):
    """What a rank has to give away, negative where it needs some."""

    tokens: int
    least_pairs: int
    most_pairs: int

    @property
    def mirrored(self) -> _Surplus:
        """The same for its partner."""
        return _Surplus(-self.tokens, -self.most_pairs, -self.least_pairs)


@dataclass(kw_only=True, slots=True, frozen=True)
class Shares:
    """What each rank is to have."""

    tokens: tuple[int, ...]
    least_pairs: int
    most_pairs: int


class _State(NamedTuple):
    estimate: int
    """Received keys, and an estimate of those of exchanges to come."""
    keys: int
    held: tuple[Held, ...]
    """Before :attr:`pieces` have moved."""
    pieces: tuple[_Piece, ...]
    unsettled: tuple[int, ...]
    tokens: tuple[int, ...]
    """By rank, like :attr:`pairs`, after they have moved."""
    pairs: tuple[int, ...]


def settle(
    owned: Sequence[Sequence[int]], lengths: Sequence[int], shares: Shares, beam: int
) -> list[list[Run]]:
    """The runs of each rank, from the documents that each one owns.

    Where no rank can settle with another one by one heavy window, the unsettled ones put together
    what they have and take windows of that.
    """
    held: tuple[Held, ...] = tuple(
        {document: ((0, lengths[document]),) for document in part} for part in owned
    )
    tokens = tuple(sum(lengths[document] for document in part) for part in owned)
    pairs = tuple(sum(pairs_up_to(lengths[document]) for document in part) for part in owned)
    states = [_settled(0, held, (), tuple(range(len(held))), tokens, pairs, shares)]
    while any(len(state.unsettled) > 1 for state in states):
        found: list[_State] = []
        for state in states:
            found += _next(state, shares) if len(state.unsettled) > 1 else [state]
        if not found:
            break
        # A stable sort: of equal ones, the first.
        found.sort(key=lambda state: (state.estimate, state.keys))
        states = [
            state._replace(held=_after(state.held, state.pieces), pieces=())
            if state.pieces
            else state
            for state in found[:beam]
        ]
    best = min(states, key=lambda state: (len(state.unsettled) > 1, state.keys))
    parts = [_runs(part) for part in best.held]
    if len(best.unsettled) > 1:
        rest = defaultdict(list)
        for rank in best.unsettled:
            for run in parts[rank]:
                rest[run.document].append(run)
        band = shares.least_pairs, shares.most_pairs
        together = [sorted(rest[document]) for document in sorted(rest)]
        filled = windows.fill(together, len(best.unsettled), band, 0)
        assert filled is not None, "without a limit windows are found"
        for rank, part in zip(best.unsettled, filled, strict=True):
            parts[rank] = part
    return parts


def _runs(part: Held) -> list[Run]:
    return [Run(document, start, stop) for document, spans in part.items() for start, stop in spans]


def _settled(
    keys: int,
    held: tuple[Held, ...],
    pieces: tuple[_Piece, ...],
    unsettled: tuple[int, ...],
    tokens: tuple[int, ...],
    pairs: tuple[int, ...],
    shares: Shares,
) -> _State:
    """A state without ranks that have their shares, and with its estimate."""
    changed = True
    while changed and unsettled:
        least, most = _band(unsettled, pairs, shares)
        changed = False
        for rank in unsettled:
            if tokens[rank] == shares.tokens[rank] and least <= pairs[rank] <= most:
                unsettled = tuple(other for other in unsettled if other != rank)
                changed = True
                break
    longest = {
        rank: max((spans[-1][1] for spans in held[rank].values()), default=1) for rank in unsettled
    }
    to_come = sum(_to_come(rank, longest, tokens, pairs, shares) for rank in unsettled)
    return _State(keys + to_come // 2, keys, held, pieces, unsettled, tokens, pairs)


def _band(unsettled: Sequence[int], pairs: Sequence[int], shares: Shares) -> tuple[int, int]:
    """Pairs with which a rank may settle, such that the others can still have theirs."""
    total, others = sum(pairs[rank] for rank in unsettled), len(unsettled) - 1
    least = max(shares.least_pairs, total - others * shares.most_pairs)
    return least, min(shares.most_pairs, total - others * shares.least_pairs)


def _to_come(
    rank: int,
    longest: dict[int, int],
    tokens: Sequence[int],
    pairs: Sequence[int],
    shares: Shares,
) -> int:
    """Estimated keys that an unsettled rank gives and takes."""
    slack = (shares.most_pairs - shares.least_pairs) // 2
    surplus = tokens[rank] - shares.tokens[rank]
    more = pairs[rank] - (shares.most_pairs + shares.least_pairs) // 2
    if more >= 0:
        return exchanged(surplus, more - slack, longest[rank])
    length = max((end for other, end in longest.items() if other != rank), default=1)
    return exchanged(-surplus, -more - slack, length)


def _next(state: _State, shares: Shares) -> Iterator[_State]:
    """All ways in which one more rank settles."""
    longest = {
        rank: max((spans[-1][1] for spans in state.held[rank].values()), default=1)
        for rank in state.unsettled
    }
    to_come = {
        rank: _to_come(rank, longest, state.tokens, state.pairs, shares) for rank in state.unsettled
    }
    least, most = _band(state.unsettled, state.pairs, shares)
    order = sorted(state.unsettled, key=lambda rank: (-to_come[rank], rank))
    for rank in order[:_MOST_SETTLED]:
        had = state.pairs[rank]
        surplus = _Surplus(state.tokens[rank] - shares.tokens[rank], had - most, had - least)
        rest = tuple(other for other in state.unsettled if other != rank)
        for partner in rest:
            found = _cheapest(state.held, rank, partner, surplus)
            if found is None:
                continue
            tokens, pairs = list(state.tokens), list(state.pairs)
            tokens[rank] -= surplus.tokens
            tokens[partner] += surplus.tokens
            pairs[rank] -= found.pairs
            pairs[partner] += found.pairs
            yield _settled(
                state.keys + found.keys,
                state.held,
                found.pieces,
                rest,
                tuple(tokens),
                tuple(pairs),
                shares,
            )


def _cheapest(held: Sequence[Held], rank: int, partner: int, surplus: _Surplus) -> _Exchange | None:
    """The exchange with the fewest keys by which ``rank`` gives its surplus to ``partner``."""
    best = min(_exchanges(held, rank, partner, surplus), default=None)
    other = min(_exchanges(held, partner, rank, surplus.mirrored), default=None)
    if other is None or (best is not None and best.keys <= other.keys):
        return best
    return other._replace(pairs=-other.pairs)


def _exchanges(
    held: Sequence[Held], giver: int, other: int, surplus: _Surplus
) -> Iterator[_Exchange]:
    """Exchanges in which ``giver`` gives a heavy window, or none, and takes light tokens."""
    gives, takes = held[giver], held[other]
    least = max(0, -surplus.tokens)
    taken: dict[int, tuple[tuple[_Piece, ...], int, int] | None] = {}
    longest = sorted(gives, key=lambda document: (-gives[document][-1][1], document))
    tries = [
        (document, light)
        for document in longest[:_MOST_HEAVY]
        for light in _amounts(gives[document][-1][1], len(takes), surplus, least)
    ]
    if surplus.tokens <= 0:
        tries.append((-1, least))
    for document, light in tries:
        if light not in taken:
            taken[light] = _beginnings(takes, gives, light, other, giver)
        found = taken[light]
        if found is None:
            continue
        pieces, pairs, keys = found
        low, high = surplus.least_pairs + pairs, surplus.most_pairs + pairs
        tokens = surplus.tokens + light
        if not tokens:
            if low <= 0 <= high:
                yield _Exchange(keys, -pairs, pieces)
            continue
        if document < 0 or any(piece.document == document for piece in pieces):
            continue
        spans = gives[document]
        for first, given in _windows(spans, tokens, low, high):
            piece = _Piece(document, giver, other, first, first + tokens)
            more = _more_keys(spans, takes.get(document, ()), piece)
            yield _Exchange(keys + more, given - pairs, (*pieces, piece))


def _amounts(length: int, documents: int, surplus: _Surplus, least: int) -> list[int]:
    """Numbers of light tokens to try: no more than needed, and that with the fewest keys.

    As :func:`parallel.context.documents.owners.exchanged`, with light tokens from k documents: x of
    them have x^2 / 2k pairs.
    """
    k = max(1, min(documents, _MOST_BEGINNINGS))
    scaled = 2 * k * surplus.least_pairs + surplus.tokens**2
    root = (k * length + surplus.tokens) ** 2 - (k + 1) * scaled
    if scaled <= 0 or root < 0:
        return [least]
    root = isqrt(root)
    # Rounded inwards.
    low = (k * length + surplus.tokens - root) // (k + 1) + 2
    high = (k * length + surplus.tokens + root) // (k + 1) - 1
    given = min(max(isqrt(scaled // (3 * k + 1)), low), high)
    best = max(given - surplus.tokens, least)
    return [least] if best == least else [least, best]


def _beginnings(
    takes: Held, gives: Held, tokens: int, source: int, to: int
) -> tuple[tuple[_Piece, ...], int, int] | None:
    """Light tokens of a few documents, with their pairs and the change of received keys."""
    first = sorted(takes, key=lambda document: (*_first_span(takes[document]), document))
    few = sorted(first[:_MOST_BEGINNINGS], key=lambda document: _tokens(takes[document][:1]))
    pieces = []
    pairs = keys = 0
    for place, document in enumerate(few):
        start, stop = takes[document][0]
        share = min(-(-tokens // (len(few) - place)), stop - start)
        if share:
            piece = _Piece(document, source, to, 0, share)
            pieces.append(piece)
            pairs += pairs_up_to(start + share) - pairs_up_to(start)
            keys += _more_keys(takes[document], gives.get(document, ()), piece)
            tokens -= share
    return (tuple(pieces), pairs, keys) if not tokens else None


def _first_span(spans: Spans) -> tuple[int, int]:
    """Sorts earlier beginnings first, and longer ones."""
    start, stop = spans[0]
    return start, start - stop


def _windows(spans: Spans, size: int, least: int, most: int) -> Iterator[tuple[int, int]]:
    """Where windows of so many tokens begin that have no fewer and no more pairs, and how many.

    The first one ends earliest. The last one leaves the earliest end to the rank that gives it.
    """
    last = _tokens(spans) - size
    if last < 0:
        return

    def pairs(first: int) -> int:
        if len(spans) == 1:
            return size * (spans[0][0] + first) + pairs_up_to(size)
        return _pairs(_between(spans, first, first + size))

    low, high = 0, last
    if len(spans) == 1:
        low = high = max(0, -(-(least - pairs(0)) // size))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pairs(middle) >= least else (middle + 1, high)
    for first in (low, last) if low < last else (last,):
        if low <= last and least <= (found := pairs(first)) <= most:
            yield first, found


def _more_keys(source: Spans, to: Spans, piece: _Piece) -> int:
    """How much later the last tokens of both ranks end, together, with a piece moved."""
    before = source[-1][1] + (to[-1][1] if to else 0)
    moved = _between(source, piece.first, piece.last)
    left = source[-1][1]
    if piece.last == _tokens(source):
        left = _between(source, 0, piece.first)[-1][1] if piece.first else 0
    return left + max(moved[-1][1], to[-1][1] if to else 0) - before


def _after(held: Sequence[Held], pieces: Sequence[_Piece]) -> tuple[Held, ...]:
    found = [dict(part) for part in held]
    for document, source, to, first, last in pieces:
        spans = found[source].pop(document)
        left = _joined((*_between(spans, 0, first), *_between(spans, last, _tokens(spans))))
        if left:
            found[source][document] = left
        moved = _between(spans, first, last)
        found[to][document] = _joined((*found[to].get(document, ()), *moved))
    return tuple(found)


def _between(spans: Spans, first: int, last: int) -> Spans:
    """Of these tokens, those from ``first`` up to ``last``."""
    found = []
    before = 0
    for start, stop in spans:
        low, high = max(start, start + first - before), min(stop, start + last - before)
        if low < high:
            found.append((low, high))
        before += stop - start
    return tuple(found)


def _joined(spans: Spans) -> Spans:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def _tokens(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def _pairs(spans: Spans) -> int:
    return sum(pairs_up_to(stop) - pairs_up_to(start) for start, stop in spans)
