"""Progress of a run, and how a terminal shows it: the case that runs, results, and time left."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
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

    def finished(self, record: Record, *, measured_now: bool) -> None: ...


class TerminalProgress:
    """One line per finished case, which ends with the time left, or in a terminal a live line.

    Cases that take turns finish together, long after they began: time left follows the rounds that
    are done, and where there is no live line each round has a line when it begins.

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
        self._done_s = 0.0
        self._num_done = 0
        self._total = len(cases)
        self._started = time.monotonic()
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
        """Count a round of the case that ran as done."""
        if self._case is not None:
            self._count(self._case.id, self._predicted.get(self._case.id, 0.0) / self._rounds)
            self._case = None

    def _count(self, case_id: str, predicted_s: float) -> None:
        """Count so much of a case's predicted time as done, as far as it has it left."""
        counted_s = min(predicted_s, self._to_do_s.get(case_id, 0.0))
        if counted_s:
            self._to_do_s[case_id] -= counted_s
            self._done_s += counted_s

    def stage(self, name: str) -> None:
        self._stage = name

    def finished(self, record: Record, *, measured_now: bool) -> None:
        self._num_done += 1
        self._end_round()
        left_s = self._to_do_s.pop(record.case_id, 0.0)
        if measured_now:
            self._done_s += left_s
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
        """The predicted time of what is left, scaled by the pace of what is done.

        Empty where nothing predicted is left: rounds that are added have no prediction.
        """
        left_s = sum(self._to_do_s.values())
        if left_s < 1e-6 * self._done_s:
            return ""
        elapsed = time.monotonic() - self._started
        pace = elapsed / self._done_s if self._done_s > 0 else 1.0
        seconds = max(0, round(left_s * pace))
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
