"""Cases that take turns: the claims on them, their rounds, and their pairs that are still open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from harness.cases.case import Case
from harness.run.rounds.deciding import (
    Pair,
    hidden_pairs,
    is_open,
    may_look,
    next_look,
    pairs_of,
    reasons_hidden,
    stop_reason,
)
from harness.run.rounds.interleaving import comparison_groups
from harness.run.rounds.options import RunOptions
from harness.run.rounds.record_builder import RecordBuilder
from harness.store.record import RecordStore


class CaseGroup:
    """Cases that take turns, and the right to measure them."""

    def __init__(self, cases: list[Case], options: RunOptions) -> None:
        self.cases = cases
        self.runs: dict[str, RecordBuilder] = {}
        """The rounds of each case that has no record yet, by case id."""
        self._options = options
        self._claims = contextlib.ExitStack()
        self._open: list[Pair] | None = None
        self._decided: list[Pair] = []
        self._at_most: list[Pair] = []
        """UNCLEAR after as many rounds as are allowed."""
        self._too_late: list[Pair] = []
        """UNCLEAR when the time was over."""
        self._hidden: list[tuple[Pair, list[str]]] = []
        """UNCLEAR in some phase, and why more rounds would not change that."""

    def claim(self, store: RecordStore, *, wait: bool) -> bool:
        """Whether no other process holds one of the cases; with ``wait``, once none does."""
        # Two processes that wait for each other's cases must ask for them in one order.
        for case in sorted(self.cases, key=lambda case: case.id):
            if not self._claims.enter_context(store.claim(case.id, wait=wait)):
                self.release()
                return False
        return True

    def release(self) -> None:
        self.runs.clear()
        self._claims.close()

    @property
    def kind(self) -> tuple[int, str]:
        """Cases of one kind can share workers."""
        return self.cases[0].world_size, self.cases[0].device

    @property
    def compares(self) -> bool:
        """Whether rounds may be added to its cases."""
        return self._options.until_decided and len(self.cases) > 1

    def look(self) -> None:
        """Close the pairs that are decided, or that get no more rounds."""
        if self._open is None:
            self._open = pairs_of(self.runs.values()) if self._options.until_decided else []
        self._open = [pair for pair in self._open if not any(run.ended for run in pair.runs)]
        for pair in list(self._open):
            number, options = pair.num_rounds, self._options
            if may_look(number, options.interleave) and not is_open(pair):
                self._open.remove(pair)
                if reasons := reasons_hidden(pair):
                    self._hidden.append((pair, reasons))
                else:
                    self._decided.append(pair)
            elif next_look(number, options.max_rounds) == number:
                self._open.remove(pair)
                self._at_most.append(pair)

    def before_second_round(self) -> list[Case]:
        """Leave out cases for which there is no time, and return them; their round is kept."""
        return []

    def give_up(self) -> None:
        """Close all pairs, undecided, because the time is over."""
        self._too_late += self._open or []
        self._open = []

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def closed(self) -> Iterator[RecordBuilder]:
        """The cases of no open pair that have no record yet.

        Baselines come last, so that a run which goes on after a crash still compares the others.
        """
        compared = {id(run) for pair in self._open or [] for run in pair.runs}
        hidden = [pair for pair, _ in self._hidden]
        ended = self._decided + self._at_most + self._too_late + hidden
        baselines = {id(pair.baseline) for pair in ended}
        runs = [run for run in self.runs.values() if not run.recorded and id(run) not in compared]
        yield from sorted(runs, key=lambda run: id(run) in baselines)

    def why_stopped(self, run: RecordBuilder, seconds: float) -> str:
        """Why a case gets no more rounds; empty if it was never compared.

        Args:
            seconds: the time that its added rounds were allowed.
        """
        late, most = (
            sum(run in pair.runs for pair in pairs) for pairs in (self._too_late, self._at_most)
        )
        hidden = [", ".join(reasons) for pair, reasons in self._hidden if run in pair.runs]
        if not (late or most or hidden or any(run in pair.runs for pair in self._decided)):
            return ""
        return stop_reason(
            run.num_finished, most=most, late=late, seconds=seconds, hidden=hidden_pairs(hidden)
        )

    def rounds_to_look(self) -> range:
        """The numbers of the rounds before the next look, from 0."""
        number = min(pair.num_rounds for pair in self._open or [])
        return range(number, next_look(number, self._options.max_rounds))

    def seconds_left(self, seconds: float) -> float:
        """What its added rounds may still take, of the time that is left for those of a batch."""
        return seconds

    def seconds_to_look(self) -> float:
        """How long these rounds will take, by the last ones."""
        return len(self.rounds_to_look()) * self._seconds_a_round

    def seconds_to_tell(self) -> float:
        """About how long it takes until the pair that is nearest to a decision has it."""
        needed = min(pair.rounds_needed - pair.num_rounds for pair in self._open or [])
        return max(len(self.rounds_to_look()), needed) * self._seconds_a_round

    @property
    def _seconds_a_round(self) -> float:
        return sum(run.last_wall_s for run in self.runs.values() if not run.recorded)


Grouping = Callable[[list[Case], RunOptions], list[CaseGroup]]
"""Puts the cases of a run into groups that take turns."""


def by_comparison(cases: list[Case], options: RunOptions) -> list[CaseGroup]:
    """Cases that tables compare take turns, where any do."""
    grouped = comparison_groups(cases) if options.in_turns else [[case] for case in cases]
    return [CaseGroup(group, options) for group in grouped]
