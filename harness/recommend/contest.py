"""The best few combinations measured in turns, until one is faster than all others or tied.

Successive halving on top of the rounds of ``until=decided``: at each look the fastest so far is the
one that others are held against; those that are slower get no further rounds, those that are the
same are tied, and rounds are added between it and the others that are open. Where the time does not
suffice for that, the slowest of the first round are left out of the second one. Times are those of
a whole batch, since micro-batches differ. The verdict is that of :mod:`harness.analysis.verdicts`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

from harness.analysis.disturbance import is_busy
from harness.analysis.verdicts import Verdict, decide, looks_at
from harness.cases.case import Case
from harness.run.rounds.case_group import CaseGroup
from harness.run.rounds.deciding import Pair, may_look, next_look, stop_reason
from harness.run.rounds.options import RunOptions
from harness.run.rounds.record_builder import RecordBuilder

PHASE = "step"

BAND = 0.01
"""Batches whose times differ by less are tied."""


FINALISTS = 2
"""Candidates that are not left out, however long their rounds take."""


class Contest(CaseGroup):
    """All candidates as one group, each held against the fastest."""

    def __init__(
        self,
        cases: list[Case],
        options: RunOptions,
        micro_batches: dict[str, int],
        ends_s: float = math.inf,
        whole_s: float = math.inf,
    ) -> None:
        super().__init__(cases, options)
        self._ends_s = ends_s
        """When rounds that are added must have ended, by :func:`time.monotonic`."""
        self._whole_s = whole_s
        """How long all may take that ends then."""
        self._is_over = False
        """Whether that ends before the time for added rounds does."""
        self._micro_batches = micro_batches
        """How many micro-batches make a batch, by case id."""
        self._slower: set[str] = set()

    def look(self) -> None:
        """Close the candidates that are slower than the fastest, or tied with it."""
        alive = [run for run in self.runs.values() if not run.ended and not run.recorded]
        alive = [run for run in alive if run.case.id not in self._slower and run.num_finished]
        if len(alive) < 2:
            self._open = []
            return
        fastest = min(alive, key=self._median_ms)
        number = min(run.num_finished for run in alive)
        self._open = []
        for run in alive:
            if run is not fastest:
                pair = Pair(choice="combination", baseline=fastest, candidate=run)
                self._sort(pair, number)

    def before_second_round(self) -> list[Case]:
        """Leave out the slowest, if the other first rounds would take longer than there is time.

        The processes of this round measure them, so that nothing is compiled again, nor checked as
        a first round is; those of an earlier run have ended. Rounds that were taken up from one may
        be of another number for each, and then all go on.
        """
        alive = [run for run in self.runs.values() if not run.ended and not run.recorded]
        if any(run.num_finished != 1 for run in alive) or len(alive) <= FINALISTS:
            return []
        alive.sort(key=self._median_ms)
        left_s = self._ends_s - time.monotonic()
        left_out = []
        while len(alive) > FINALISTS and self._first_rounds_s(alive) > left_s:
            left_out.append(alive.pop().case)
            del self.runs[left_out[-1].id]
        return left_out

    def _first_rounds_s(self, runs: list[RecordBuilder]) -> float:
        """How long the first rounds will take after one of them."""
        again_s = (self._options.interleave - 1) * sum(run.again_s for run in runs)
        return again_s + sum(run.last_wall_s - run.again_s for run in runs if run.is_taken_up)

    def seconds_left(self, seconds: float) -> float:
        until_end_s = self._ends_s - time.monotonic()
        self._is_over = until_end_s < seconds
        return min(seconds, until_end_s)

    def _sort(self, pair: Pair, number: int) -> None:
        """Put a pair where its verdict belongs."""
        if not may_look(number, self._options.interleave):
            self._open = [*(self._open or []), pair]
            return
        verdict = self.verdict(pair)
        if verdict.word in ("SLOWER", "SAME"):
            self._decided.append(pair)
            if verdict.word == "SLOWER":
                self._slower.add(pair.candidate.case.id)
        elif next_look(number, self._options.max_rounds) == number:
            self._at_most.append(pair)
        else:
            pair.rounds_needed = verdict.needed
            self._open = [*(self._open or []), pair]

    def verdict(self, pair: Pair) -> Verdict:
        """The candidate against the fastest, by the rounds that both have."""
        number = pair.num_rounds
        one, other = pair.runs
        busy = one.case.device == "cpu" and any(
            is_busy(load) for run in pair.runs for load in run.loads()
        )
        return decide(
            self._batches_ms(one)[:number],
            self._batches_ms(other)[:number],
            band=BAND,
            looks=looks_at(number, until_decided=True),
            baseline_processes=one.processes[:number],
            candidate_processes=other.processes[:number],
            busy=busy,
        )

    def _batches_ms(self, run: RecordBuilder) -> list[list[float]]:
        return scaled(run.rounds_ms(PHASE), self._micro_batches[run.case.id])

    def _median_ms(self, run: RecordBuilder) -> float:
        times = [time for times in self._batches_ms(run) for time in times]
        return median(times) if times else float("inf")

    def why_stopped(self, run: RecordBuilder, seconds: float) -> str:
        if run.case.id in self._slower:
            return stop_reason(run.num_finished)
        return super().why_stopped(run, round(self._whole_s) if self._is_over else seconds)


def scaled(rounds_ms: Sequence[Sequence[float]], times: int) -> list[list[float]]:
    """Times of a batch from those of its micro-batches."""
    return [[times * time for time in of_round] for of_round in rounds_ms]
