"""``until=decided``: which pairs of cases are still open after a look at their rounds, and for how
long rounds are added to them.

Pairs are those of the comparison table: among cases that differ in attention, or in strategy, each
against the baseline of those that ran, and a strategy also against its peer. The verdict is that
of :mod:`harness.analysis.verdicts`, whose error rate holds over all looks. Pairs that are UNCLEAR
for a reason that more rounds would not change (:func:`why_hidden`) get none. Where the time does
not suffice for all others, those that are nearest to a decision come first: an even share would
leave all of them a little short, and a ratio at the edge of the band, which no number of rounds
tells, would take as much as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from harness.cases.case import Case, label
from harness.cases.columns import POINTS
from harness.cases.hardware import find_hardware
from harness.cases.peers import peer_groups
from harness.run.rounds.options import AUTO_BUDGET_S
from harness.run.rounds.record_builder import RecordBuilder


@dataclass(kw_only=True, slots=True, eq=False)
class Pair:
    """A case and the one that it is compared with."""

    choice: str
    """What they differ in: attention or strategy."""
    baseline: RecordBuilder
    candidate: RecordBuilder
    rounds_needed: int = field(default=0, init=False)
    """About how many rounds would tell, by the last look that left it open."""

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
        beside = list(_with_peers(members)) if choice == "strategy" else []
        beside += [
            (baseline, candidate)
            for candidate in candidates
            if not {(baseline, candidate), (candidate, baseline)} & set(beside)
        ]
        found += [Pair(choice=choice, baseline=one, candidate=other) for one, other in beside]
    return found


def _with_peers(runs: list[RecordBuilder]) -> Iterator[tuple[RecordBuilder, RecordBuilder]]:
    """Peers of strategies, and the runs of those that name them."""
    for peers, candidates in peer_groups([asdict(run.case.parallel) for run in runs]):
        if len(peers) == 1:
            yield from ((runs[peers[0]], runs[place]) for place in candidates)


def is_open(pair: Pair) -> bool:
    """Whether a phase that tables compare is UNCLEAR after the rounds that both have, and more
    rounds may change that."""
    # Load numpy, which plans and commands without comparisons do not need.
    from harness.analysis.disturbance import is_busy
    from harness.analysis.verdicts import decide, looks_at

    one, other = pair.runs
    number = pair.num_rounds
    looks = looks_at(number, until_decided=True)
    busy = one.case.device == "cpu" and any(
        is_busy(load) for run in pair.runs for load in run.loads()
    )
    needed = []
    for phase in one.case.task.compared_phases:
        if why_hidden(pair, phase):
            continue
        rounds = [run.rounds_ms(phase)[:number] for run in pair.runs]
        if not all(samples for of_run in rounds for samples in of_run):
            continue
        verdict = decide(
            *rounds,
            looks=looks,
            baseline_processes=one.processes[:number],
            candidate_processes=other.processes[:number],
            busy=busy,
        )
        if verdict.word == "UNCLEAR":
            needed.append(verdict.needed)
    pair.rounds_needed = max(needed, default=0)
    return bool(needed)


def reasons_hidden(pair: Pair) -> list[str]:
    """Why more rounds would not tell the two apart in some phase; nothing if they would in all."""
    phases = pair.baseline.case.task.compared_phases
    return list(dict.fromkeys(filter(None, (why_hidden(pair, phase) for phase in phases))))


def why_hidden(pair: Pair, phase: str) -> str:
    """Why more rounds do not tell the two apart in a phase; empty if they may.

    Backends are not compared by times that the host decides, and a time that cannot be true says
    nothing. Noise and the load of others are no such reasons: the interval is as wide as they make
    it, and rounds narrow it.
    """
    # Loads pandas.
    from harness.analysis.host_time import host_time

    for run in pair.runs:
        if not any(run.rounds_ms(phase)):
            continue
        if reason := _why_impossible(run, phase):
            return reason
        if pair.choice == "attention" and host_time(run.phase(phase), run.case.device).host_bound:
            return "host-bound"
    return ""


def _why_impossible(run: RecordBuilder, phase: str) -> str:
    """Why the times of a phase cannot be true, as :mod:`harness.analysis.physics` has it."""
    from harness.analysis.physics import OVER_WHOLE, WHOLES

    def mean_ms(name: str) -> float:
        times = [time for times in run.rounds_ms(name) for time in times]
        return fmean(times) if times else 0.0

    if any(time <= 0 for times in run.rounds_ms(phase) for time in times):
        return "a time is not above zero"
    parts_ms = sum(mean_ms(part) for part in WHOLES.get(phase, ()))
    if parts_ms > OVER_WHOLE * mean_ms(phase):
        return "the parts of a pass take longer than the whole"
    work = run.case.task.work(run.case).get(phase)
    hardware = find_hardware(next((found.get("device_name") for found in run.environments), None))
    peak = hardware.peak_tflops.get(run.case.precision.peak) if hardware else None
    times_ms = [time for times in run.rounds_ms(phase) for time in times]
    if work and peak and times_ms and work.flops / median(times_ms) > peak * 1e9:
        return "a rate is above the device's peak"
    return ""


def may_look(num_rounds: int, first_rounds: int) -> bool:
    """Whether pairs are looked at after so many rounds: each further look costs certainty."""
    from harness.analysis.verdicts import LOOKS

    return num_rounds in LOOKS or num_rounds == first_rounds > LOOKS[0]


def next_look(num_rounds: int, most_rounds: int) -> int:
    """The number of rounds at the next look; ``num_rounds`` if there is none."""
    from harness.analysis.verdicts import more_rounds

    return num_rounds + more_rounds(num_rounds, most_rounds)


def stop_reason(
    num_rounds: int, *, most: int = 0, late: int = 0, seconds: float = 0.0, hidden: str = ""
) -> str:
    """The text of a record's ``stopped``.

    Args:
        most: pairs that are UNCLEAR after as many rounds as were allowed.
        late: those that are UNCLEAR because the time was over.
        seconds: that time.
        hidden: the text on pairs that more rounds would not tell; see :func:`hidden_pairs`.
    """
    rounds = f"{num_rounds} rounds" if num_rounds != 1 else "1 round"
    said = []
    if late:
        said.append(f"time budget of {seconds:g} s, after {rounds}: {_pairs(late)} UNCLEAR")
    if most:
        said.append(f"{rounds}, the most allowed: {_pairs(most)} UNCLEAR")
    if hidden:
        said.append(f"{rounds}: {hidden}")
    return "; ".join(said) or f"decided after {rounds}"


def hidden_pairs(reasons: Sequence[str]) -> str:
    """How many pairs more rounds would not tell, and why; empty for none."""
    if not reasons:
        return ""
    why = " and ".join(dict.fromkeys(reasons))
    return f"{_pairs(len(reasons))} UNCLEAR, which more rounds would not change ({why})"


def _pairs(number: int) -> str:
    return f"{number} pair{'' if number == 1 else 's'}"


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


def affordable(
    costs_s: Sequence[float], seconds: float, until_told_s: Sequence[float] = ()
) -> set[int]:
    """Which of several costs are paid from a time, those first that are told soonest.

    Args:
        until_told_s: how long it will take until each is told; its cost where that is not given.
    """
    order = until_told_s or costs_s
    fit = set()
    for index in sorted(range(len(costs_s)), key=lambda index: order[index]):
        if costs_s[index] <= seconds:
            seconds -= costs_s[index]
            fit.add(index)
    return fit
