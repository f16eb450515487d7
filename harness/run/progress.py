"""Progress of a run, and how a terminal shows it: the case that runs, results, and time left."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich import progress as bars
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from harness.cases.case import Case
from harness.store.record import Record

_STYLES = {"ok": "green", "oom": "yellow", "unsupported": "yellow"}


class Progress(Protocol):
    """Listens to a run: which case starts, its stages, and its record."""

    def started(self, case: Case) -> None: ...

    def stage(self, name: str) -> None: ...

    def left_out(self, case: Case) -> None:
        """A case has begun and gets no record in this run."""

    def finished(self, record: Record, *, measured_now: bool) -> None: ...


@dataclass(slots=True)
class _Turns:
    """How long turns were predicted to take, and took."""

    predicted_s: float = 0.0
    took_s: float = 0.0

    @property
    def pace(self) -> float:
        """The time that a predicted second takes; 0 while none is known."""
        return self.took_s / self.predicted_s if self.predicted_s else 0.0


class TerminalProgress:
    """One line per finished case, which ends with the time left, or in a terminal a live line.

    Cases that take turns finish together, long after they began: time left follows the turns that
    are done, and where there is no live line each round has a line when it begins. A case's first
    turn compiles and checks more than its further ones, so these have a pace of their own.

    Args:
        rounds: of each case, at first.
    """

    def __init__(
        self,
        console: Console,
        cases: list[Case],
        predict: Callable[[Case], float],
        rounds: int = 1,
    ) -> None:
        self.console = console
        self._predicted = {case.id: predict(case) for case in cases}
        self._titles = {case.id: case.title for case in cases}
        self._rounds = rounds
        self._begun: Counter[str] = Counter()
        self._round = 1
        self._to_do_s = dict(self._predicted)
        self._turns = {True: _Turns(), False: _Turns()}
        """Of the first turns of cases, and of all further ones."""
        self._num_done = 0
        self._total = len(cases)
        self._turn_began = time.monotonic()
        self._case: Case | None = None
        self._stage = ""
        self._bar = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task("attnbench", total=self._total, left="")
        self._live = Live(
            get_renderable=self._render, console=console, transient=True, refresh_per_second=4
        )

    def __enter__(self) -> TerminalProgress:
        if self.console.is_terminal and self._total:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def started(self, case: Case) -> None:
        self._end_round()
        self._case = case
        self._stage = ""
        self._begun[case.id] += 1
        begun = self._begun[case.id]
        if begun > self._round and not self.console.is_terminal:
            first = begun <= self._rounds
            what = (
                f" of {self._rounds}, {self._time_left()}" if first else ", until pairs are decided"
            )
            self.console.print(f"      round {begun}{what}", highlight=False)
        # Cases that are measured for the first time begin another batch.
        self._round = max(self._round, begun) if begun > 1 else 1

    def _end_round(self) -> None:
        """Count the turn of the case that ran as done, with what came before it."""
        if self._case is None:
            return
        now, case_id = time.monotonic(), self._case.id
        if case_id in self._to_do_s and self._begun[case_id] <= self._rounds:
            predicted_s = self._predicted[case_id] / self._rounds
            self._to_do_s[case_id] -= predicted_s
            turns = self._turns[self._begun[case_id] == 1]
            turns.predicted_s += predicted_s
            turns.took_s += now - self._turn_began
        self._turn_began, self._case = now, None

    def stage(self, name: str) -> None:
        self._stage = name

    def left_out(self, case: Case) -> None:
        self._end_round()
        self._to_do_s.pop(case.id, None)
        self._total -= 1
        self._bar.update(self._task, total=self._total)

    def finished(self, record: Record, *, measured_now: bool) -> None:
        self._num_done += 1
        self._end_round()
        self._to_do_s.pop(record.case_id, None)
        self._bar.update(self._task, completed=self._num_done)
        title = self._titles.get(record.case_id, "")
        status = record.status if measured_now else f"{record.status} (by another run)"
        style = _STYLES.get(record.status, "bold red")
        number = f"[{self._num_done:>{len(str(self._total))}}/{self._total}]"
        line = f"{escape(number)} {escape(title or record.case_id)}  [{style}]{status}[/]"
        left = "" if self.console.is_terminal else self._time_left()
        has_more = left and self._num_done < self._total
        words = filter(None, [_result(record), f"({left})" if has_more else ""])
        self.console.print("  ".join([line, *map(escape, words)]), highlight=False, soft_wrap=True)

    def _time_left(self) -> str:
        """The predicted time of what is left, by the paces of first and of further turns.

        Empty where nothing predicted is left: rounds that are added have no prediction.
        """
        running = self._case.id if self._case is not None else None
        first_s = sum(
            left_s / self._rounds
            for case_id, left_s in self._to_do_s.items()
            if self._begun[case_id] == (case_id == running)
        )
        further_s = sum(self._to_do_s.values()) - first_s
        if first_s + further_s < 1e-6 * sum(self._predicted.values()):
            return ""
        first = self._turns[True].pace or 1.0
        # Before it is known, between the predicted one, which is 1, and that of first turns.
        further = self._turns[False].pace or math.sqrt(first)
        seconds = max(0, round(first_s * first + further_s * further))
        return f"about {seconds // 60}:{seconds % 60:02d} left"

    def _render(self) -> Table:
        self._bar.update(self._task, left=self._time_left())
        grid = Table.grid()
        grid.add_row(self._bar)
        running = f"{self._case.title}: {self._stage}" if self._case else self._stage
        grid.add_row(f"[dim]running {escape(running)}[/]")
        return grid


def _result(record: Record) -> str:
    """The headline of a record: its phases' medians, or why there are none."""
    if record.status != "ok":
        return record.error["message"] if record.error else ""
    parts = []
    for name, phase in record.phases.items():
        slowest = [max(samples) for samples in zip(*phase.samples_ms, strict=False)]
        if slowest:
            parts.append(f"{name} {statistics.median(slowest):.4g} ms")
    return ", ".join(parts)
