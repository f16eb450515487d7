"""Runs a list of cases on warm workers and records each.

The local launcher runs a whole sweep through it; a task of a Slurm job array runs its share.
Cases of one world size share a worker group. With ``interleave=R`` the measured passes of each
case are split into R rounds. A round goes over many cases before the next one begins; cases that
differ only in attention or strategy take their turns side by side, in random order, so that a
drifting clock or a noisy neighbour affects all of them alike, and every round has worker processes
of its own (``fresh_rounds``), since two processes differ in speed for as long as they live. Every
round builds its model anew, so that no two cases have to fit into memory at once. Finished rounds
are kept (:mod:`harness.store.rounds`), and the run after an interrupted one starts from them.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial

from harness.cases.case import Case
from harness.printing import warn
from harness.run.children.reply import Reply
from harness.run.device_lock import exclusive_device
from harness.run.held_signals import signals_held
from harness.run.nodes.hosts import Hosts
from harness.run.progress import Progress
from harness.run.rounds.case_group import CaseGroup, Grouping, by_comparison
from harness.run.rounds.deciding import Budget, affordable
from harness.run.rounds.interleaving import turns
from harness.run.rounds.options import RunOptions
from harness.run.rounds.record_builder import RecordBuilder
from harness.run.warm_workers import Workers
from harness.run.workers.worker_group import WorkerStartError
from harness.store.record import RecordStore, is_final
from harness.store.rounds import RoundStore, conditions, why_not_joined

MAX_REPEATS = 2
"""How often in a row new workers take over from such as ended before they began with a case."""

BATCH_S = 120.0
"""How long the first round takes on further cases before the second one begins. Starting workers
takes seconds, once a round; cases are recorded, and claims of other runs answered, once a batch."""


class Runner:
    """Runs cases one after another on a worker group, which it replaces when the group breaks."""

    def __init__(
        self,
        options: RunOptions,
        store: RecordStore,
        progress: Progress,
        hosts: Hosts | None = None,
        grouping: Grouping = by_comparison,
        workers: Workers | None = None,
    ) -> None:
        self.options = options
        self._grouping = grouping
        self.store = store
        self.progress = progress
        self._rounds = RoundStore(store)

        def on_start() -> None:
            progress.stage("starting workers")

        self._workers = workers or Workers(options, hosts, on_start)
        self._workers.serve(options, on_start)
        self._keeps_workers = workers is not None
        self._budget = Budget(None, 0)
        self._files_before: set[str] = set()
        self._current: RecordBuilder | None = None

    def run(self, cases: Iterable[Case], files_before: set[str] | None = None) -> None:
        """Measure every case that has no final record yet; after any exception no worker is left.

        Workers that were given are kept otherwise, for whoever gave them.

        Args:
            files_before: record files that existed when the cases were planned; newer ones are
                results of this plan, whatever their status. None stands for the files of now.
        """
        if files_before is None:
            files_before = set(self.store.names())
        self._files_before = files_before
        groups = self._grouping(list(cases), self.options)
        self._budget = Budget(self.options.budget_s, sum(len(group.cases) for group in groups))
        # Warm workers are kept per world size, so cases of one size run together.
        pending = deque(sorted(groups, key=lambda group: group.kind[0]))
        deferred: deque[CaseGroup] = deque()
        with contextlib.ExitStack() as unless_kept:
            # A group that is in the middle of a case would not begin another one.
            unless_kept.callback(self._workers.end if self._keeps_workers else self._workers.close)
            while pending:
                deferred += self._run_batch(pending, wait=False)
            while deferred:
                deferred.extendleft(reversed(self._run_batch(deferred, wait=True)))
            if self._keeps_workers:
                unless_kept.pop_all()

    def _run_batch(self, pending: deque[CaseGroup], *, wait: bool) -> list[CaseGroup]:
        """Measure groups from the left of ``pending``; returns those that other processes hold.

        Args:
            wait: wait for the first of them. Nothing is held meanwhile, so that no two processes
                wait for each other.
        """
        batch: list[CaseGroup] = []
        held: list[CaseGroup] = []
        began_s = time.monotonic()
        with contextlib.ExitStack() as releases:
            while pending and (not batch or self._takes(batch, pending[0], began_s)):
                group = pending.popleft()
                if not group.claim(self.store, wait=wait and not batch):
                    held.append(group)
                    continue
                releases.callback(group.release)
                batch.append(group)
                self._open(group)
                self._measure_group(group, 0)
            for round_index in range(1, self.options.interleave):
                # In another order than before, so that none is always first in new workers.
                for group in random.Random(round_index).sample(batch, len(batch)):
                    if round_index == 1:
                        for case in group.before_second_round():
                            self.progress.left_out(case)
                    self._measure_group(group, round_index)
            self._decide(batch, time.monotonic() - began_s)
        return held

    def _takes(self, batch: list[CaseGroup], group: CaseGroup, began_s: float) -> bool:
        """Whether a group joins a batch: not without rounds, where it would delay records."""
        return (
            self.options.in_turns
            and group.kind == batch[0].kind
            and time.monotonic() - began_s < BATCH_S
        )

    def _is_done(self, case: Case) -> bool:
        """Whether another process has measured a case since this run was planned."""
        record = self.store.find(case.id)
        if record is None:
            return False
        file = self.store.path(case.id, record.attempt).name
        if file in self._files_before and (
            self.options.remeasure != "none" or not is_final(record, retry=self.options.retry)
        ):
            return False
        self.progress.finished(record, measured_now=False)
        return True

    def _open(self, group: CaseGroup) -> None:
        """Begin with a group's cases that are not recorded yet, from the rounds kept of them."""
        for case in group.cases:
            if not self._is_done(case):
                group.runs[case.id] = RecordBuilder(case, self.options.interleave)
        self._take_up_rounds(list(group.runs.values()))

    def _measure_group(self, group: CaseGroup, round_index: int) -> None:
        """One round of a group's cases, without those that have it already or have ended."""
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        last = round_index == self.options.interleave - 1 and not group.compares
        for case in turns(group.cases, round_index):
            run = group.runs.get(case.id)
            if run is None or run.recorded or round_index < run.num_finished:
                continue
            run.begin_round(began_at)
            self._current = run
            self.progress.started(case)
            with self._device_of(case):
                self._measure_round(run, round_index, last=last)
        if all(run.recorded for run in group.runs.values()):
            group.release()

    def _decide(self, batch: list[CaseGroup], first_rounds_s: float) -> None:
        """Add rounds to pairs that are UNCLEAR, until none is or the time is over; record all."""
        budget_s = self._budget.share(sum(len(group.cases) for group in batch), first_rounds_s)
        going_on = self._look(batch, budget_s)
        began_s = time.monotonic()
        while going_on:
            most = max(len(group.rounds_to_look()) for group in going_on)
            left_s = budget_s - (time.monotonic() - began_s)
            left_s = min(group.seconds_left(left_s) for group in going_on)
            left_s -= self._workers.starts_in(most, going_on[0].cases[0]) * self._workers.start_s
            costs_s = [group.seconds_to_look() for group in going_on]
            fit = affordable(costs_s, left_s, [group.seconds_to_tell() for group in going_on])
            for index, group in enumerate(going_on):
                if index not in fit:
                    group.give_up()
                    self._record_closed(group, budget_s)
            added = [group for index, group in enumerate(going_on) if index in fit]
            rounds = {id(group): group.rounds_to_look() for group in added}
            for offset in range(max(map(len, rounds.values()), default=0)):
                for group in added:
                    if offset < len(rounds[id(group)]):
                        self._measure_group(group, rounds[id(group)][offset])
            going_on = self._look(batch, budget_s)
        self._budget.spend(time.monotonic() - began_s)

    def _look(self, batch: list[CaseGroup], budget_s: float) -> list[CaseGroup]:
        """Record what is decided; returns the groups that are not."""
        for group in batch:
            group.look()
            self._record_closed(group, budget_s)
        return [group for group in batch if group.is_open]

    def _record_closed(self, group: CaseGroup, budget_s: float) -> None:
        for run in list(group.closed()):
            run.stopped = group.why_stopped(run, round(budget_s))
            self._finish(run)
        if all(run.recorded for run in group.runs.values()):
            group.release()

    def _take_up_rounds(self, runs: list[RecordBuilder]) -> None:
        """Start each case from the rounds of an earlier run, if conditions are unchanged.

        Otherwise the old rounds stay on disk until the first round of this run replaces them.
        """
        not_used: Counter[str] = Counter()
        for run in runs:
            try:
                kept = self._rounds.find(run.case.id)
            except ValueError as error:
                not_used[f"they cannot be read ({error})"] += 1
                continue
            if kept is None:
                continue
            with self._device_of(run.case):
                run.environments = self._workers.for_case(run.case).environments
            now = conditions(run.environments)
            ranks = run.case.world_size
            reason = why_not_joined(kept, self.options.interleave, ranks, now)
            if reason is None:
                run.take_up(kept)
            else:
                not_used[reason] += 1
        for reason, number in not_used.items():
            cases = "a case" if number == 1 else f"{number} cases"
            warn(f"finished rounds of {cases} are measured again: {reason}")

    def _device_of(self, case: Case) -> contextlib.AbstractContextManager[None]:
        waiting = partial(self.progress.stage, "waiting for another run on this device")
        return exclusive_device(case.device, waiting)

    def _finish(self, run: RecordBuilder) -> None:
        # A signal to stop that comes now may wait for the milliseconds that this takes.
        with signals_held():
            self._current = None
            record = run.to_record()
            run.recorded = True
            self.store.write(record)
            self._rounds.tidy()
            self.progress.finished(record, measured_now=True)

    def give_up_current(self, status: str, message: str) -> None:
        """Record the case that is being measured as given up; called from a signal handler."""
        if self._current is not None:
            self._current.give_up(status, message)
            self._finish(self._current)

    def _measure_round(self, run: RecordBuilder, round_index: int, *, last: bool) -> None:
        reply, log_tail, wall_s = self._reply(run, round_index)
        # A signal to stop that comes now may wait until the round, or the case, is on disk.
        with signals_held():
            self._current = None
            run.add(reply, log_tail, wall_s, self._workers.process)
            if run.ended or last:
                self._finish(run)
            else:
                self._keep_rounds(run)
        if not reply.healthy or self.options.isolate:
            self._workers.end()

    def _reply(self, run: RecordBuilder, round_index: int) -> tuple[Reply, str, float]:
        """One round on workers that live to begin with it; also the end of their log, and seconds.

        Raises WorkerStartError if several groups in a row do not.
        """
        rounds = self.options.interleave
        planned = f" of {rounds}" if round_index < rounds else ""
        turn = f"round {round_index + 1}{planned}, " if self.options.in_turns else ""
        for _ in range(1 + MAX_REPEATS):
            group = self._workers.for_round(run)
            run.environments = group.environments
            started = time.monotonic()
            reply = group.run(
                run.case,
                rounds=rounds,
                round_index=round_index,
                until_decided=self.options.until_decided,
                timeout_s=self.options.timeout_s,
                on_stage=lambda stage: self.progress.stage(turn + stage),
            )
            if not reply.lost:
                log_tail = "" if reply.healthy else group.log_tail()
                return reply, log_tail, time.monotonic() - started
            logs = group.logs
            self._workers.end()
            warn(f"{reply.lost}, which is therefore measured by a new one; {logs}")
        raise WorkerStartError(f"{reply.lost}, {1 + MAX_REPEATS} times in a row; {logs}")

    def _keep_rounds(self, run: RecordBuilder) -> None:
        try:
            self._rounds.keep(run.to_rounds())
        except OSError as error:
            # The rounds are still held here, and a record that has no place either is rescued.
            warn(
                f"{self._rounds.folder}: cannot keep the rounds of {run.case.id} "
                f"({error.strerror}); they are lost if this run is stopped"
            )
