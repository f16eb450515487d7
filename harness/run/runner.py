"""Runs a list of cases on warm workers and records each.

The local launcher runs a whole sweep through it; a task of a Slurm job array runs its share.
Cases of one world size share a worker group. With ``interleave=R`` the measured passes of cases
that differ only in attention or strategy are split into R rounds, A B A B, so that a drifting
clock or a noisy neighbour affects all of them alike. Every round builds its model anew, so that
no two cases have to fit into memory at once. Finished rounds are kept
(:mod:`harness.store.rounds`), and the run after an interrupted one starts from them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial

from harness.cases.case import Case
from harness.run.device_lock import exclusive_device
from harness.run.hosts import Hosts
from harness.run.interleaving import comparison_groups
from harness.run.options import RunOptions
from harness.run.progress import Progress
from harness.run.record_builder import RecordBuilder
from harness.run.worker_group import WorkerGroup
from harness.store.record import RecordStore, is_final
from harness.store.rounds import RoundStore, conditions, why_not_joined


class Runner:
    """Runs cases one after another on a worker group, which it replaces when the group breaks."""

    def __init__(
        self,
        options: RunOptions,
        store: RecordStore,
        progress: Progress,
        hosts: Hosts | None = None,
    ) -> None:
        self.options = options
        self.store = store
        self.progress = progress
        self._rounds = RoundStore(store)
        self._hosts = hosts
        self._group: WorkerGroup | None = None
        # Unlike those of earlier runs, whose rounds may be joined with those of this one.
        self._process = int(time.time())
        self._files_before: set[str] = set()
        self._current: RecordBuilder | None = None

    def run(self, cases: Iterable[Case], files_before: set[str] | None = None) -> None:
        """Measure every case that has no final record yet; after any exception no worker is left.

        Args:
            files_before: record files that existed when the cases were planned; newer ones are
                results of this plan, whatever their status. None stands for the files of now.
        """
        if files_before is None:
            files_before = {path.name for path in self.store.folder.iterdir()}
        self._files_before = files_before
        pending = (
            comparison_groups(cases) if self.options.interleave > 1 else [[case] for case in cases]
        )
        # Warm workers are kept per world size, so cases of one size run together.
        pending.sort(key=lambda group: group[0].world_size)
        try:
            deferred = [group for group in pending if not self._run_claimed(group, wait=False)]
            for group in deferred:
                self._run_claimed(group, wait=True)
        finally:
            self._close_group()

    def _run_claimed(self, group: list[Case], *, wait: bool) -> bool:
        """Measure a group unless another process holds one of its cases; returns whether it did."""
        with contextlib.ExitStack() as claims:
            # Two processes that wait for each other's cases must ask for them in one order.
            for case in sorted(group, key=lambda case: case.id):
                if not claims.enter_context(self.store.claim(case.id, wait=wait)):
                    return False
            self._measure_group([case for case in group if not self._is_done(case)])
            return True

    def _is_done(self, case: Case) -> bool:
        """Whether another process has measured a case since this run was planned."""
        record = self.store.find(case.id)
        if record is None:
            return False
        file = self.store.path(case.id, record.attempt).name
        if file in self._files_before and not is_final(record, retry=self.options.retry):
            return False
        self.progress.finished(record, measured_now=False)
        return True

    def _measure_group(self, group: list[Case]) -> None:
        rounds = self.options.interleave
        runs = [RecordBuilder(case, rounds) for case in group]
        self._take_up_rounds(runs)
        for round_index in range(rounds):
            began_at = datetime.now(UTC).isoformat(timespec="seconds")
            for run in runs:
                if run.ended or round_index < run.num_finished:
                    continue
                run.begin_round(began_at)
                self._current = run
                self.progress.started(run.case)
                with self._device_of(run.case):
                    self._measure_round(run, round_index)

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
                now = conditions(self._group_for(run.case).environments)
            reason = why_not_joined(kept, self.options.interleave, now)
            if reason is None:
                run.take_up(kept)
            else:
                not_used[reason] += 1
        for reason, number in not_used.items():
            cases = "a case" if number == 1 else f"{number} cases"
            print(
                f"attnbench: finished rounds of {cases} are measured again: {reason}",
                file=sys.stderr,
            )

    def _device_of(self, case: Case) -> contextlib.AbstractContextManager[None]:
        waiting = partial(self.progress.stage, "waiting for another run on this device")
        return exclusive_device(case.device, waiting)

    def _finish(self, run: RecordBuilder) -> None:
        # A signal to stop that comes now may wait for the milliseconds that this takes.
        with signals_held():
            self._current = None
            record = run.to_record()
            self.store.write(record)
            self._rounds.tidy()
            self.progress.finished(record, measured_now=True)

    def give_up_current(self, status: str, message: str) -> None:
        """Record the case that is being measured as given up; called from a signal handler."""
        if self._current is not None:
            self._current.give_up(status, message)
            self._finish(self._current)

    def _measure_round(self, run: RecordBuilder, round_index: int) -> None:
        case, rounds = run.case, self.options.interleave
        group = self._group_for(case)
        run.environments = group.environments
        turn = f"round {round_index + 1} of {rounds}, " if rounds > 1 else ""
        started = time.monotonic()
        reply = group.run(
            case,
            rounds=rounds,
            round_index=round_index,
            timeout_s=self.options.timeout_s,
            on_stage=lambda stage: self.progress.stage(turn + stage),
        )
        wall_s = time.monotonic() - started
        log_tail = "" if reply.healthy else group.log_tail()
        # A signal to stop that comes now may wait until the round, or the case, is on disk.
        with signals_held():
            self._current = None
            run.add(reply, log_tail, wall_s, self._process)
            if run.ended or round_index == rounds - 1:
                self._finish(run)
            else:
                self._keep_rounds(run)
        if not reply.healthy or self.options.isolate:
            self._close_group()

    def _keep_rounds(self, run: RecordBuilder) -> None:
        try:
            self._rounds.keep(run.to_rounds())
        except OSError as error:
            # The rounds are still held here, and a record that has no place either is rescued.
            print(
                f"attnbench: {self._rounds.folder}: cannot keep the rounds of {run.case.id} "
                f"({error.strerror}); they are lost if this run is stopped",
                file=sys.stderr,
            )

    def _group_for(self, case: Case) -> WorkerGroup:
        fits = (
            self._group is not None
            and self._group.world_size == case.world_size
            and self._group.device == case.device
        )
        if not fits:
            self._close_group()
            self.progress.stage("starting workers")
            self._process += 1
            self._group = WorkerGroup(
                device=case.device,
                world_size=case.world_size,
                options=self.options,
                hosts=self._hosts,
                dynamo=case.uses_dynamo,
            )
        assert self._group is not None
        return self._group

    def _close_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.close()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals to stop until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        # Handlers run in the main thread, and only it may set them.
        yield
        return
    held: list[int] = []
    # A signal mask is not enough: it holds for one thread, and another would get the signal.
    before = {
        stopping: signal.signal(stopping, lambda number, frame: held.append(number))
        for stopping in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
        if signal.getsignal(stopping) is not None
    }
    try:
        yield
    finally:
        for stopping, handler in before.items():
            signal.signal(stopping, handler)
        for number in held:
            signal.raise_signal(number)
