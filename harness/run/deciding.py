"""``until=decided``: which pairs of cases are still open after a look at their rounds, and for how
long rounds are added to them.

Pairs are those of the comparison table: among cases that differ in attention, or in strategy, each
against the baseline of those that ran. The verdict is that of :mod:`harness.analysis.verdicts`,
whose error rate holds over all looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.cases.case import Case, label
from harness.cases.columns import POINTS
from harness.run.options import RunOptions
from harness.run.record_builder import RecordBuilder

AUTO_BUDGET_S = (20.0, 300.0)
"""Without ``budget_s=``, added rounds of a batch of cases take as long as its first rounds did, but
may always take the first of these; those of the whole run take no longer than the second."""


@dataclass(kw_only=True, slots=True, eq=False)
class Pair:
    """A case and the one that it is compared with."""

    baseline: RecordBuilder
    candidate: RecordBuilder

    @property
    def num_rounds(self) -> int:
        """Rounds that both have."""
        return min(self.baseline.num_finished, self.candidate.num_finished)

    @property
    def runs(self) -> tuple[RecordBuilder, RecordBuilder]:
        return self.baseline, self.candidate


def pairs_of(runs: Iterable[RecordBuilder]) -> list[Pair]:
    """The pairs of a group of cases that differ in attention or strategy, as tables pair them."""
    usable = [run for run in runs if not run.ended]
    return [
        *_pairs_along("attention", usable, lambda case: (case.attention, case.parallel)),
        *_pairs_along("strategy", usable, lambda case: (case.parallel, case.attention)),
    ]


def _pairs_along(
    choice: str, runs: list[RecordBuilder], parts: Callable[[Case], tuple[Any, Any]]
) -> list[Pair]:
    """Pairs that differ in one choice; ``parts`` gives a case's choice and what must be equal."""
    point = POINTS[choice]

    def place(run: RecordBuilder) -> tuple[bool, Any]:
        name = label(parts(run.case)[0])
        return name.split("(")[0] != point.baseline, point.rank(name)

    alike: dict[str, list[RecordBuilder]] = {}
    for run in runs:
        alike.setdefault(repr(parts(run.case)[1]), []).append(run)
    found = []
    for members in alike.values():
        baseline, *candidates = sorted(members, key=place)
        found += [Pair(baseline=baseline, candidate=candidate) for candidate in candidates]
    return found


def is_open(pair: Pair) -> bool:
    """Whether a phase that tables compare is UNCLEAR, after the rounds that both have."""
    # Loads numpy, which plans and commands without comparisons do not need.
    from harness.analysis.verdicts import decide, looks_at

    one, other = pair.runs
    number = pair.num_rounds
    looks = looks_at(number, until_decided=True)
    for phase in one.case.task.compared_phases:
        rounds = [run.rounds_ms(phase)[:number] for run in pair.runs]
        if not all(samples for of_run in rounds for samples in of_run):
            continue
        verdict = decide(
            *rounds,
            looks=looks,
            baseline_processes=one.processes[:number],
            candidate_processes=other.processes[:number],
        )
        if verdict.word == "UNCLEAR":
            return True
    return False


def may_look(num_rounds: int, first_rounds: int) -> bool:
    """Whether pairs are looked at after so many rounds: each further look costs certainty."""
    from harness.analysis.verdicts import LOOKS

    return num_rounds in LOOKS or num_rounds == first_rounds > LOOKS[0]


def next_look(num_rounds: int, most_rounds: int) -> int:
    """The number of rounds at the next look; ``num_rounds`` if there is none."""
    from harness.analysis.verdicts import more_rounds

    return num_rounds + more_rounds(num_rounds, most_rounds)


def why_stopped(run: RecordBuilder, undecided: int, seconds: float | None) -> str:
    """The text of a record's ``stopped``; see :func:`harness.analysis.verdicts.stop_reason`."""
    from harness.analysis.verdicts import stop_reason

    limit_s = None if seconds is None else round(seconds)
    return stop_reason(run.num_finished, undecided=undecided, seconds=limit_s)


class Budget:
    """The time for added rounds of all cases of a run, shared out among batches of them."""

    def __init__(self, limit_s: float | None, num_cases: int) -> None:
        self._limit_s = limit_s
        self._left_s = AUTO_BUDGET_S[1] if limit_s is None else limit_s
        self._num_left = num_cases

    def share(self, num_cases: int, first_rounds_s: float) -> float:
        """The seconds for the next batch of cases; what it does not spend is there for later ones.

        Args:
            first_rounds_s: how long the rounds took that all its cases have.
        """
        share_s = self._left_s * num_cases / max(num_cases, self._num_left)
        self._num_left -= num_cases
        if self._limit_s is None:
            return min(share_s, max(AUTO_BUDGET_S[0], first_rounds_s))
        return share_s

    def spend(self, seconds: float) -> None:
        self._left_s = max(0.0, self._left_s - seconds)


def most_seconds(options: RunOptions, first_rounds_s: float) -> float:
    """The most time that added rounds of one batch take; see :class:`Budget`."""
    if options.budget_s is not None:
        return options.budget_s
    least_s, most_s = AUTO_BUDGET_S
    return min(most_s, max(least_s, first_rounds_s))


def affordable(costs_s: Sequence[float], seconds: float) -> set[int]:
    """Which of several costs fit together, the lowest first, so that most are served."""
    fit = set()
    for index in sorted(range(len(costs_s)), key=lambda index: costs_s[index]):
        seconds -= costs_s[index]
        if seconds < 0:
            break
        fit.add(index)
    return fit
