"""Measures combinations on this host, as cases of a results folder like any others."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.analysis.row_verdicts import in_turns
from harness.analysis.run_to_run import assumed_level
from harness.analysis.stats import by_round, median, slowest_rank
from harness.analysis.verdicts import decide, looks_at
from harness.cases.case import Case
from harness.cases.recorded import load
from harness.printing import warn
from harness.recommend.combination import Combination
from harness.recommend.contest import BAND, PHASE, Contest, scaled
from harness.recommend.question import Question
from harness.render.registries import FIGURES, TABLES, made_by_default
from harness.run.launcher import Launcher, PendingCases
from harness.run.progress import TerminalProgress
from harness.run.rounds.case_group import CaseGroup, Grouping, by_comparison
from harness.run.rounds.options import RunOptions
from harness.run.warm_workers import Workers
from harness.store.attempts import Records
from harness.store.record import Record, RecordStore, in_short, is_final
from harness.store.sweep_plan import SweepPlan, write_plan

FIRST_ROUNDS = 5
"""Rounds of every candidate, after which the first verdicts may fall."""

ADDED = 0.25
"""Of the time for measuring, what rounds may take that are added after the first."""


@dataclass(kw_only=True, slots=True)
class Bench:
    """Where and for how long to measure."""

    results: Path
    launcher: Launcher
    """Of this host."""
    budget_s: float
    timeout_s: float
    console: Console
    command: str
    label: str
    """The sweep that candidates belong to, and whose folder holds the report."""
    case_ids: list[str] = field(default_factory=list)
    """All that were measured for it."""
    screened: list[Combination] = field(default_factory=list)
    left_out: list[Combination] = field(default_factory=list)
    """Those of a contest for which there was no time after their first round."""
    _ends_s: float = field(init=False)
    """When the time is over, by :func:`time.monotonic`."""
    _workers: Workers | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._ends_s = time.monotonic() + self.budget_s

    @contextlib.contextmanager
    def warm(self) -> Iterator[None]:
        """Keep workers from run to run: to start some, and compilers in them, takes seconds."""
        options = RunOptions(results=self.results, timeout_s=self.timeout_s)
        with contextlib.closing(Workers(options, None, lambda: None)) as workers:
            self._workers = workers
            try:
                yield
            finally:
                # Nothing would close what a later run starts with them.
                self._workers = None

    def contest(self, candidates: Sequence[Combination]) -> None:
        """Measure candidates in turns until the fastest is decided or the time is over.

        One alone is measured without rounds, if it has not been yet: there is nothing to decide.
        """
        if len(candidates) == 1 and candidates[0].measured_ms is not None:
            return
        if len(candidates) == 1:
            options = RunOptions(results=self.results, timeout_s=self.timeout_s)
            self._run([candidates[0].case], options, by_comparison)
            self.read(candidates)
            return
        accumulation = {item.case.id: item.accumulation for item in candidates}
        options = RunOptions(
            results=self.results,
            timeout_s=self.timeout_s,
            interleave=FIRST_ROUNDS,
            until_decided=True,
            budget_s=self.budget_s * ADDED,
            # A process that compiles takes longer to start than all its steps. Candidates of one
            # contest share theirs, so that what is peculiar to one concerns all of them.
            fresh_rounds=False,
        )

        def one_group(cases: list[Case], options: RunOptions) -> list[CaseGroup]:
            return [Contest(cases, options, accumulation, self._ends_s, self.budget_s)]

        self._run([item.case for item in candidates], options, one_group)
        self.read(candidates)
        self.left_out = [item for item in candidates if item.record is None]

    def screen(self, candidates: Sequence[Combination]) -> None:
        """Measure a few steps of each candidate, one after another; the fastest of them counts.

        What else a host does makes some slower and none faster.
        """
        options = RunOptions(results=self.results, timeout_s=self.timeout_s)
        self._run([quick(item.case) for item in candidates], options, by_comparison)
        records = self._records()
        for item in candidates:
            item.measured_ms = measured_ms(records.get(quick(item.case).id), middle=min)
        self.screened += candidates

    def fits(self, case: Case) -> bool:
        """Whether one step of a case runs without running out of memory.

        Raises ValueError in one line where it neither runs nor runs out of memory.
        """
        task: Any = case.task
        one = replace(case, task=replace(task, warmup_steps=1, measure_steps=1))
        self._run([one], RunOptions(results=self.results, timeout_s=self.timeout_s), by_comparison)
        record = self._records().get(one.id)
        if record is None or record.status not in ("ok", "oom"):
            found = "not measured" if record is None else record.status
            raise ValueError(f"{case.title}: {found}, so that what fits is not known")
        return record.status == "ok"

    def read(self, candidates: Iterable[Combination]) -> None:
        """Take the times of candidates from the records that exist."""
        records = self._records()
        for item in candidates:
            item.record = records.get(item.case.id)
            if item.record is not None:
                item.measured_ms = measured_ms(item.record)

    def _records(self) -> Records:
        return load(RecordStore(self.results))[0]

    def _run(self, cases: list[Case], options: RunOptions, grouping: Grouping) -> None:
        """Measure what has no record yet. OSError where the folder cannot be written."""
        store = RecordStore(self.results)
        store.create()
        self.case_ids += [case.id for case in cases if case.id not in self.case_ids]
        write_plan(store.results, self._sweep_plan())
        records, problems = load(store)
        for problem in in_short(problems):
            warn(f"{problem}; measured again")
        todo = [case for case in cases if not _stands(records.get(case.id))]
        if not todo:
            return

        def predict(case: Case) -> float:
            return 1.0

        with TerminalProgress(self.console, todo, predict, options.interleave) as progress:
            pending = PendingCases(
                cases=todo,
                options=options,
                store=store,
                progress=progress,
                command=self.command,
                predict=predict,
                grouping=grouping,
                workers=self._workers,
            )
            self.launcher.launch(pending)

    def _sweep_plan(self) -> SweepPlan:
        return SweepPlan(
            label=self.label,
            name="recommend",
            title="Candidates of a recommendation",
            about="Measured by attnbench recommend.",
            command=self.command,
            scale="full",
            tables=made_by_default(TABLES),
            figures=made_by_default(FIGURES),
            case_ids=self.case_ids,
        )


def label_of(question: Question, command: str = "recommend") -> str:
    """The folder of a question's report, by what was asked."""
    digest = hashlib.sha256(question.asked.encode()).hexdigest()[:6]
    return f"{command}-{question.model.name}-{question.seq_len}-{digest}"


def quick(case: Case) -> Case:
    """A few steps of a case: another case, with a record of its own."""
    task: Any = case.task
    return replace(case, task=replace(task, warmup_steps=1, measure_steps=2))


def measured_ms(
    record: Record | None, middle: Callable[[list[float]], float] = median
) -> float | None:
    """Median time of a step on the slowest rank, or another middle, if it was measured."""
    if record is None or record.status != "ok" or PHASE not in record.phases:
        return None
    return middle(slowest_rank(record.phases[PHASE].samples_ms))


def standing(winner: Combination, other: Combination) -> str:
    """FASTER, SLOWER, SAME or UNCLEAR: ``other`` against the winner, by their records."""
    one, two = winner.record, other.record
    if one is None or two is None:
        return "UNCLEAR"
    number = min(len(one.round_states), len(two.round_states))
    processes = [[item.process for item in record.round_states[:number]] for record in (one, two)]
    began = [record.notes.get("rounds_started_at", []) for record in (one, two)]
    in_one_contest = in_turns(*began) and processes[0] == processes[1]
    # The same command measures what was left out in a process of its own.
    level = assumed_level(measured_ms(one) or math.inf, None, winner.case.device)
    return decide(
        _batches_ms(winner, one)[:number],
        _batches_ms(other, two)[:number],
        band=BAND,
        looks=looks_at(number, until_decided=True),
        paired=in_one_contest,
        baseline_processes=processes[0],
        candidate_processes=processes[1],
        level=None if in_one_contest else level,
    ).word


def launched_first(ranked: list[Combination]) -> list[Combination]:
    """The same combinations, but before a captured best the first launched one that is the same.

    Launching is simpler than capturing, which replays one batch from addresses that may not move.
    """
    if not ranked or not ranked[0].is_captured:
        return ranked
    for item in ranked[1:]:
        if not item.is_captured and standing(ranked[0], item) == "SAME":
            return [item, *(other for other in ranked if other is not item)]
    return ranked


def _batches_ms(item: Combination, record: Record) -> list[list[float]]:
    samples = slowest_rank(record.phases[PHASE].samples_ms)
    return scaled(by_round(samples, record.rounds), item.accumulation)


def _stands(record: Record | None) -> bool:
    return record is not None and is_final(record, retry=False)
