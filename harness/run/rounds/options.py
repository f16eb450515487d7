"""How to run cases: where results go, time limits, rounds and retries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

AUTO_BUDGET_S = (20.0, 300.0)
"""Without ``budget_s=``, added rounds of a batch of cases take as long as its first rounds did, but
may always take the first of these; those of the whole run take no longer than the second."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunOptions:
    """How to run cases; nothing here changes what is measured."""

    results: Path
    timeout_s: float = 600.0
    isolate: bool = False
    retry: bool = False
    remeasure: str = "none"
    """``stale`` or ``all`` if cases were planned although good records of them exist."""
    interleave: int = 1
    """Rounds that the measured passes of each case are split into; not a number of cases."""
    fresh_rounds: bool | None = None
    """Whether every round of a case has worker processes of its own. None starts them anew for each
    round of one rank or of CPU ranks, and for every second round of several GPUs, whose start
    takes 5 to 15 s."""
    until_decided: bool = False
    """Whether rounds are added to compared cases that are still UNCLEAR."""
    budget_s: float | None = None
    """Time for all added rounds; None is as long as the first rounds took, within limits."""
    max_rounds: int = 56
    """The most rounds of a case, added ones included."""
    vote_timeout_s: float = 60.0
    wait: bool = False
    """Follow cases that run elsewhere until their records are there."""

    @property
    def in_turns(self) -> bool:
        """Whether compared cases are measured in rounds, and so together."""
        return self.interleave > 1 or self.until_decided


def most_seconds(options: RunOptions, first_rounds_s: float) -> float:
    """The most time that added rounds of one batch take (:mod:`harness.run.rounds.deciding`)."""
    if options.budget_s is not None:
        return options.budget_s
    least_s, most_s = AUTO_BUDGET_S
    return min(most_s, max(least_s, first_rounds_s))
