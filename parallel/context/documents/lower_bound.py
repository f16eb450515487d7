"""Keys that any placement as balanced as a given one needs."""

from __future__ import annotations

import itertools

from parallel.context.documents.placement import Placement
from parallel.context.documents.runs import pairs_up_to


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
