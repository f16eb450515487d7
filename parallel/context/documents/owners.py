"""Which rank owns each document before tokens are exchanged: a local search.

Whole documents rarely balance tokens and pairs at once. What is missing is exchanged between ranks
(:mod:`parallel.context.documents.transfers`), and :class:`Exchanges` estimates its keys from two
numbers of each rank, its surplus of tokens and of pairs. The search moves documents and swaps two
of them while the estimate falls.
"""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import NamedTuple

Owners = tuple[int, ...]
"""For each rank the set of its documents, as bits of an integer."""

_ALL_SWAPPED = 8
"""Documents of a rank up to which each of them is tried in a swap."""


@dataclass(kw_only=True, slots=True)
class Exchanges:
    """The keys that ranks must exchange, as estimated from the documents that each one owns.

    A rank with p pairs and t tokens too many gives X heavy tokens that end at position e, for which
    its partner receives e keys, and takes X - t of the lightest ones, the beginnings of documents,
    for as many keys. X tokens before e have X e - X^2 / 2 pairs, and x light ones from two
    documents x^2 / 4, so that

        e = (p + (X - t)^2 / 4) / X + X / 2,

    and e + X - t is least at X^2 = (4 p + t^2) / 7. No token is behind the end of the longest
    document: e <= n is a quadratic inequality for X. A rank with too few pairs is its partner.
    """

    lengths: Sequence[int]
    """Tokens of each document, the longest first."""
    tokens: int
    """A rank's share."""
    pairs: int
    """A rank's share."""
    slack: int
    """Pairs that it may have more or fewer."""
    _known: dict[int, int] = field(default_factory=dict)

    def keys(self, owned: int, tokens: int, pairs: int) -> int:
        """Keys that a rank with these documents gives and takes, twice its part of the sum."""
        found = self._known.get(owned)
        if found is None:
            found = self._known[owned] = self._keys(owned, tokens, pairs)
        return found

    def _keys(self, owned: int, tokens: int, pairs: int) -> int:
        surplus, more = tokens - self.tokens, pairs - self.pairs
        if more < 0:
            surplus, more, owned = -surplus, -more, ~owned
        longest = (owned & -owned).bit_length() - 1
        length = self.lengths[longest] if 0 <= longest < len(self.lengths) else 1
        return exchanged(surplus, more - self.slack, length)


def exchanged(surplus: int, pairs: int, length: int) -> int:
    """Keys of the cheapest exchange that gives away a surplus of tokens and of pairs."""
    if pairs <= 0:
        return abs(surplus)
    scaled = 4 * pairs + surplus * surplus
    root = (2 * length + surplus) ** 2 - 3 * scaled
    if root < 0 or 2 * length + surplus < 0:
        # No one window has so many pairs: more than any window costs.
        return 2 * abs(surplus) + 3 * length + 2 * isqrt(pairs)
    root = isqrt(root)
    given = isqrt(scaled // 7)
    given = min(max(given, (2 * length + surplus - root) // 3), (2 * length + surplus + root) // 3)
    given = max(given, surplus, 1)
    taken = given - surplus
    return max((4 * pairs + taken * taken) // (4 * given) + given // 2, given) + taken


class _Change(NamedTuple):
    """A document that goes to another rank, and perhaps one that comes back."""

    keys: int
    """The change of the estimate."""
    to: int
    document: int
    other: int
    """-1 without."""


class _Search:
    """Owners of documents, and what changes when some of them move."""

    def __init__(self, exchanges: Exchanges, owners: Sequence[int], num_ranks: int) -> None:
        self._exchanges, self._lengths = exchanges, exchanges.lengths
        self._pairs = [n * (n + 1) // 2 for n in exchanges.lengths]
        self._owners = list(owners)
        self.owned = [0] * num_ranks
        self._tokens_of, self._pairs_of = [0] * num_ranks, [0] * num_ranks
        self._documents_of: list[list[int]] = [[] for _ in range(num_ranks)]
        for document, rank in enumerate(owners):
            self._give(document, rank, 1)
        self._keys = [self._of(rank, 0, 0, 0) for rank in range(num_ranks)]
        self.evaluated = 0

    @property
    def keys(self) -> int:
        return sum(self._keys)

    def changes(self, document: int) -> list[_Change]:
        """Ways to move a document, or to swap it with another one."""
        source = self._owners[document]
        length, pairs = self._lengths[document], self._pairs[document]
        found = []
        for to in range(len(self.owned)):
            if to == source:
                continue
            before = self._keys[source] + self._keys[to]
            for other in (-1, *self._others(document, to)):
                changed, tokens, work = 1 << document, length, pairs
                if other >= 0:
                    changed |= 1 << other
                    tokens -= self._lengths[other]
                    work -= self._pairs[other]
                left = self._of(source, changed, -tokens, -work)
                found.append(
                    _Change(
                        left + self._of(to, changed, tokens, work) - before, to, document, other
                    )
                )
        self.evaluated += len(found)
        return found

    def make(self, change: _Change) -> None:
        source = self._owners[change.document]
        for document, start, to in (
            (change.document, source, change.to),
            (change.other, change.to, source),
        ):
            if document >= 0:
                self._give(document, start, -1)
                self._give(document, to, 1)
                self._owners[document] = to
        for rank in (source, change.to):
            self._keys[rank] = self._of(rank, 0, 0, 0)

    def after(self, change: _Change) -> Owners:
        """The owners if this change were made."""
        changed = 1 << change.document | (0 if change.other < 0 else 1 << change.other)
        owned = list(self.owned)
        owned[self._owners[change.document]] ^= changed
        owned[change.to] ^= changed
        return tuple(sorted(owned))

    def descend(self, budget: int) -> None:
        """Make the best change of one document after another until none lowers the estimate."""
        idle, document = 0, 0
        while idle < len(self._owners) and self.keys and self.evaluated < budget:
            best = min(self.changes(document), default=None)
            if best is not None and best.keys < 0:
                self.make(best)
                idle = 0
            else:
                idle += 1
            document = (document + 1) % len(self._owners)

    def _of(self, rank: int, changed: int, tokens: int, pairs: int) -> int:
        return self._exchanges.keys(
            self.owned[rank] ^ changed, self._tokens_of[rank] + tokens, self._pairs_of[rank] + pairs
        )

    def _others(self, document: int, to: int) -> Sequence[int]:
        """Documents to swap it with: all, or those that would even out tokens or pairs best."""
        there = self._documents_of[to]
        if len(there) <= _ALL_SWAPPED:
            return there
        source = self._owners[document]
        found = set()
        for sizes, loads, share in (
            (self._lengths, self._tokens_of, self._exchanges.tokens),
            (self._pairs, self._pairs_of, self._exchanges.pairs),
        ):
            for wanted in (share - loads[source], loads[to] - share):
                # Documents are sorted from the longest to the shortest.
                wanted += sizes[document]
                at = bisect.bisect_left(there, -wanted, key=lambda other: -sizes[other])
                found.update(there[max(0, at - 1) : at + 1])
        return sorted(found)

    def _give(self, document: int, rank: int, sign: int) -> None:
        self.owned[rank] ^= 1 << document
        self._tokens_of[rank] += sign * self._lengths[document]
        self._pairs_of[rank] += sign * self._pairs[document]
        if sign > 0:
            bisect.insort(self._documents_of[rank], document)
        else:
            self._documents_of[rank].remove(document)


def likely_owners(
    exchanges: Exchanges, num_ranks: int, *, starts: int, kept: int, budget: int
) -> list[Owners]:
    """The owners with the lowest estimates, the lowest first.

    Args:
        starts: local searches; the first one begins with the longest documents on the ranks that
            have the least so far, the others at random.
        kept: owners to return, from the ends of all searches and those one change beside them.
        budget: changes to look at; the first search is not cut short before that.
    """
    count = len(exchanges.lengths)
    found: dict[Owners, int] = {}
    for start in range(starts):
        draw = random.Random(start)
        owners = (
            [draw.randrange(num_ranks) for _ in range(count)]
            if start
            else _longest_first(exchanges, num_ranks)
        )
        search = _Search(exchanges, owners, num_ranks)
        search.descend(budget)
        found[tuple(sorted(search.owned))] = search.keys
        if kept > 1 and search.keys and search.evaluated < budget:
            near = [change for document in range(count) for change in search.changes(document)]
            for change in heapq.nsmallest(kept, near):
                found[search.after(change)] = search.keys + change.keys
        budget -= search.evaluated
        if budget <= 0 or not search.keys:
            break
    return sorted(found, key=lambda owners: (found[owners], owners))[:kept]


def _longest_first(exchanges: Exchanges, num_ranks: int) -> list[int]:
    """Each document on the rank that has the smallest shares of tokens and pairs with it."""
    tokens, pairs = [0] * num_ranks, [0] * num_ranks
    owners = []
    for length in exchanges.lengths:
        # In units of a rank's tokens times its pairs.
        def load(rank: int, length: int = length) -> int:
            more = pairs[rank] + length * (length + 1) // 2
            fuller = tokens[rank] + length - exchanges.tokens
            over = max(0, more - exchanges.pairs) * 2
            return (pairs[rank] + over) * exchanges.tokens + 2 * max(0, fuller) * exchanges.pairs

        rank = min(range(num_ranks), key=load)
        owners.append(rank)
        tokens[rank] += length
        pairs[rank] += length * (length + 1) // 2
    return owners
