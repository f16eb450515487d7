"""A lower bound on the keys that ranks receive, for any placement as balanced as a given one.

Let no rank have more than L tokens and C pairs, so that none has fewer than l and c, what is left
of the batch if all others have the most. Rank r needs all keys before e_rd, the position after the
last of its tokens of document d. A document of n tokens *belongs* to the rank that has its last
one, where e_rd = n; so the other ranks' e_rd, *foreign* ones, add up to the received keys K.

**Document by document.** Let e_1 = n >= e_2 >= ... be the ends of one document. Tokens at e_{j+1}
and beyond are on j ranks: there are at most j L, with at most j C pairs. Hence

    n - e_{j+1} <= j L    and    n (n + 1) / 2 - e_{j+1} (e_{j+1} + 1) / 2 <= j C.

**Rank by rank.** A rank to which documents S belong, of t tokens and p pairs in all, has y of
their tokens elsewhere, with foreign ends of the sum E, and x tokens of other documents, with
foreign ends of the sum F. Summed over ranks, E is K, and F is K; so 2 K is the sum of E + F.

1. Foreign pieces with x_i tokens before e_i >= x_i have together, with X = sum(x_i) and
   Z = sum(e_i), Z >= X and at most X Z - X (X - 1) / 2 pairs. One has at most
   x_i e_i - x_i (x_i - 1) / 2, those of the last x_i tokens before e_i, and the difference of X Z -
   X (X - 1) / 2 and the sum of these is that of x_i e_j + x_j e_i - x_i x_j >= 0 over pairs i < j.
2. X tokens of k documents have at least X^2 / 2k pairs, as x_i have at least x_i^2 / 2, and at most
   X n - (X^2 / k - X) / 2, if no document is longer than n.
3. t - y + x is between l and L. What the rank gives and takes leaves it p - P_out + P_in pairs.

If p > C, then P_out >= p - C + x^2 / 2k by 2, x >= y - (t - l) by 3, F >= x, and by 1

    E >= y    and    E >= (p - C + x^2 / 2k) / y + (y - 1) / 2.

With x as small as it may be, both are convex functions of y, and the least E + F is found by
bisection. If p < c the same holds with given and taken tokens exchanged. Otherwise E >= t - L and
F >= l - t. That bounds E + F, and E alone, by a function of S; every document belongs to one rank,
so that the least sum over all partitions into as many sets as ranks is a bound.

Partitions are those of the longest documents. The others may belong to any rank, partly or wholly,
and S then has between t and t + t_rest tokens, and p and p + p_rest pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.context.documents.placement import Placement
from parallel.context.documents.runs import pairs_up_to

_PARTITIONED = 8
"""Documents of which all partitions are tried: the time grows as 3 to this power."""


def least_received(placement: Placement) -> int:
    """Keys that all ranks receive at least, if none has more tokens or pairs than the most here."""
    ranks = range(placement.num_ranks)
    most_tokens = max(map(placement.tokens, ranks))
    most_pairs = max(map(placement.pairs, ranks))
    lengths = sorted(filter(None, placement.lengths), reverse=True)
    singly = [_of_one(length, most_tokens, most_pairs) for length in lengths]
    if len(ranks) < 2 or not lengths:
        return sum(singly)
    few, rest = lengths[:_PARTITIONED], lengths[_PARTITIONED:]
    limits = _Limits(
        least_tokens=sum(lengths) - (len(ranks) - 1) * most_tokens,
        most_tokens=most_tokens,
        least_pairs=sum(map(pairs_up_to, lengths)) - (len(ranks) - 1) * most_pairs,
        most_pairs=most_pairs,
        lengths=tuple(few),
        rest=tuple(rest),
    )
    given, both = [], []
    for owned in range(1 << len(few)):
        # The rest may be foreign at no less than this, whichever the partition.
        alone = sum(keys for bit, keys in enumerate(singly[: len(few)]) if owned >> bit & 1)
        given.append(max(alone, limits.exchanged(owned, 0)))
        both.append(max(alone, limits.exchanged(owned, 1)))
    return max(
        sum(singly),
        _least_partition(given, len(few), len(ranks)),
        -(-_least_partition(both, len(few), len(ranks)) // 2),
    )


def _of_one(length: int, most_tokens: int, most_pairs: int) -> int:
    """The bound for one document, as if it had all ranks to itself."""
    total, tokens, pairs = 0, length, pairs_up_to(length)
    while True:
        tokens, pairs = tokens - most_tokens, pairs - most_pairs
        end = max(tokens, _stop_of(pairs))
        if end <= 0:
            return total
        total += end


def _stop_of(pairs: int) -> int:
    """The least number of tokens with so many causal pairs."""
    return _least(lambda stop: pairs_up_to(stop) >= pairs)


def _least(holds: Callable[[int], bool], low: int = 0, high: int | None = None) -> int:
    """The least integer from ``low`` on for which a condition holds, as for all after it.

    ``high``, if it holds for none before that.
    """
    if high is None:
        high = low + 1
        while not holds(high):
            high = low + 2 * (high - low)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


class _Side(NamedTuple):
    """Documents whose tokens go one way."""

    documents: int
    tokens: int
    longest: int


@dataclass(kw_only=True, slots=True, frozen=True)
class _Limits:
    """What no rank may exceed, and the documents of the batch."""

    least_tokens: int
    most_tokens: int
    least_pairs: int
    most_pairs: int
    lengths: tuple[int, ...]
    """Tokens of the documents whose owners are known, the longest first."""
    rest: tuple[int, ...]
    """And of those that may belong to any rank."""

    def exchanged(self, owned: int, taken: int) -> int:
        """At least E + taken F of a rank with these documents, as bits; ``taken`` is 0 or 1."""
        mine = [length for bit, length in enumerate(self.lengths) if owned >> bit & 1]
        others = [length for bit, length in enumerate(self.lengths) if not owned >> bit & 1]
        own, foreign = _side([*mine, *self.rest]), _side([*others, *self.rest])
        tokens, pairs = sum(mine), sum(map(pairs_up_to, mine))
        most_tokens, most_pairs = (
            tokens + sum(self.rest),
            pairs + sum(map(pairs_up_to, self.rest)),
        )
        if pairs > self.most_pairs:
            # y given tokens, and x >= y - (t - l).
            free = most_tokens - self.least_tokens
            least = max(0, tokens - self.most_tokens)
            return _cheapest(pairs - self.most_pairs, least, free, own, foreign, 1, taken)
        if most_pairs < self.least_pairs:
            # x taken tokens, and y >= x - (L - t).
            free = self.most_tokens - tokens
            least = max(0, self.least_tokens - most_tokens)
            return _cheapest(self.least_pairs - most_pairs, least, free, foreign, own, taken, 1)
        given, needed = tokens - self.most_tokens, self.least_tokens - most_tokens
        return max(0, given, taken * needed)


def _side(lengths: Sequence[int]) -> _Side:
    return _Side(len(lengths), sum(lengths), max(lengths, default=0))


def _cheapest(
    pairs: int, least: int, free: int, heavy: _Side, light: _Side, of_heavy: int, of_light: int
) -> int:
    """The least weighted sum of ends if one side loses pairs and the other gives tokens for them.

    Args:
        pairs: that the heavy side gives and the light side does not give back.
        least: tokens of the heavy side, at least.
        free: its tokens for which none come back.
        of_heavy, of_light: weights of the ends, 0 or 1.
    """

    def enough(tokens: int) -> bool:
        # At most X n - (X^2 / k - X) / 2 pairs.
        k = heavy.documents
        most = 2 * k * tokens * heavy.longest - tokens * tokens + k * tokens
        return most >= 2 * k * pairs

    # The number of pairs above grows up to k n tokens, and no more are there.
    if not heavy.documents or not enough(heavy.tokens):
        return heavy.tokens + light.tokens
    low = _least(enough, max(1, least), heavy.tokens)

    def ends(tokens: int) -> tuple[int, int]:
        """The sum as a numerator and a denominator."""
        back = max(0, tokens - free)
        k = max(1, light.documents)
        scale = 2 * k * tokens
        needed = 2 * k * pairs + back * back + k * tokens * (tokens - 1)
        return of_heavy * max(needed, scale * tokens) + of_light * scale * back, scale

    def rises(tokens: int) -> bool:
        here, scale = ends(tokens)
        after, next_scale = ends(tokens + 1)
        return here * next_scale <= after * scale

    numerator, scale = ends(_least(rises, low, max(low, heavy.tokens)))
    return -(-numerator // scale)


def _least_partition(costs: Sequence[int], count: int, most_sets: int) -> int:
    """The least sum of costs of disjoint sets that hold everything, the empty set filling up.

    Args:
        costs: of each set, as bits.
        count: elements.
        most_sets: how many sets there are.
    """
    everything = (1 << count) - 1
    best = costs[everything] + (most_sets - 1) * costs[0]
    found = list(costs)
    for sets in range(2, min(most_sets, count) + 1):
        after = [0] * len(costs)
        for whole in range(1, everything + 1):
            # One set holds the first element.
            first = whole & -whole
            others = whole ^ first
            left, least = others, costs[whole] + found[0]
            while left:
                least = min(least, found[left] + costs[whole ^ left])
                left = (left - 1) & others
            after[whole] = least
        after[0] = sets * costs[0]
        found = after
        best = min(best, found[everything] + (most_sets - sets) * costs[0])
    return best
