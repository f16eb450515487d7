"""Runs of tokens: the pieces of documents that a placement gives to ranks.

A causal token at position p attends to p + 1 keys, so that late tokens are heavier than early ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


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


def ends(runs: Iterable[Run]) -> dict[int, int]:
    """For each document of these runs, the position after its last token there."""
    found: dict[int, int] = {}
    for run in runs:
        found[run.document] = max(run.stop, found.get(run.document, 0))
    return found


def keys_received(runs: Sequence[Run]) -> int:
    """Keys outside these runs that their queries see under a causal mask."""
    return sum(ends(runs).values()) - sum(run.tokens for run in runs)
