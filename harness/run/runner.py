"""Runs a list of cases on this host's warm workers and records each.

The local launcher runs a whole sweep through it; a task of a cluster's job array runs its
share. Cases of one world size share a worker group. With ``interleave=R`` the measured passes
of cases that differ in nothing but their attention, or how ranks train together, are split into
R rounds, A B A B, so that a drifting clock or a noisy neighbour meets all of them. Every round
makes its model anew, so that no two cases have to fit into memory at once. Finished rounds are
kept (:mod:`harness.store.rounds`), and a run that follows one that was stopped takes them up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from harness.cases.case import Case
from harness.run.agents import Hosts
from harness.run.workers import Reply, WorkerGroup
from harness.statuses import STATUSES
from harness.store.record import Phase, Record, RecordStore, is_final
from harness.store.rounds import Rounds, RoundStore, conditions, why_not_joined


@dataclass(kw_only=True, slots=True, frozen=True)
class RunOptions:
    """How to run cases; nothing here changes what is measured."""

    results: Path
    timeout_s: float = 600.0
    isolate: bool = False
    retry: bool = False
    interleave: int = 1
    """Rounds that the measured passes of each case are split into; not a number of cases."""
    vote_timeout_s: float = 60.0
    wait: bool = False
    """Follow cases that run elsewhere until their records are there."""


class Progress(Protocol):
    """Who is told how a run goes on."""

    def started(self, case: Case) -> None: ...

    def stage(self, name: str) -> None: ...

    def finished(self, record: Record, *, measured_now: bool) -> None: ...


class Runner:
    """Owns the worker group of the moment and replaces it when it breaks."""

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
        self._files_before: set[str] = set()
        self._current: _Run | None = None

    def run(self, cases: Iterable[Case], files_before: set[str] | None = None) -> None:
        """Measure every case that has no good record yet; on any exception no worker stays.

        Args:
            files_before: record files that existed when the cases were planned; newer ones of
                the cases are results of this plan, whatever their status. None is those of now.
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
        """Measure a group unless another process is at it; True when nothing is left to do."""
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
        runs = [_Run(case, rounds) for case in group]
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

    def _take_up_rounds(self, runs: list[_Run]) -> None:
        """Give each case of a group the rounds that an earlier run has finished, if they hold.

        Those that do not stay where they are until the first round of this run replaces them.
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

    def _finish(self, run: _Run) -> None:
        # A signal to stop that comes now may wait for the milliseconds that this takes.
        with signals_held():
            self._current = None
            record = run.to_record()
            self.store.write(record)
            self._rounds.tidy()
            self.progress.finished(record, measured_now=True)

    def give_up_current(self, status: str, message: str) -> None:
        """Record that the case which is being measured will not be ended; from a signal handler."""
        if self._current is not None:
            self._current.give_up(status, message)
            self._finish(self._current)

    def _measure_round(self, run: _Run, round_index: int) -> None:
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
            run.add(reply, log_tail, wall_s)
            if run.ended or round_index == rounds - 1:
                self._finish(run)
            else:
                self._keep_rounds(run)
        if not reply.healthy or self.options.isolate:
            self._close_group()

    def _keep_rounds(self, run: _Run) -> None:
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
            self._group = WorkerGroup(
                device=case.device,
                world_size=case.world_size,
                logs=self.options.results / "logs",
                profiles=self.options.results / "profiles",
                vote_timeout_s=self.options.vote_timeout_s,
                timeout_s=self.options.timeout_s,
                hosts=self._hosts,
                dynamo=case.uses_dynamo,
            )
        assert self._group is not None
        return self._group

    def _close_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.close()


class _Run:
    """One case on its way to a record, round by round."""

    def __init__(self, case: Case, num_rounds: int) -> None:
        self.case = case
        self.ended = False
        self.environments: list[dict[str, Any]] = []
        self._num_rounds = num_rounds
        self._num_taken_up = 0
        self._started_at: list[str] = []
        self._wall_s = 0.0
        self._rounds: list[list[dict[str, Any]]] = []
        self._status = "ok"
        self._error: dict[str, Any] | None = None

    @property
    def num_finished(self) -> int:
        return len(self._rounds)

    def take_up(self, kept: Rounds) -> None:
        """Begin with the rounds of an earlier run."""
        self._num_taken_up = len(kept.outcomes)
        self._rounds, self._started_at = kept.outcomes, kept.started_at
        self._wall_s = kept.wall_s

    def to_rounds(self) -> Rounds:
        """What the next run needs to go on from here."""
        return Rounds(
            case_id=self.case.id,
            num_rounds=self._num_rounds,
            conditions=conditions(self.environments),
            started_at=self._started_at,
            wall_s=self._wall_s,
            outcomes=self._rounds,
        )

    def begin_round(self, began_at: str) -> None:
        self._started_at.append(began_at)

    def add(self, reply: Reply, log_tail: str, wall_s: float) -> None:
        """Take in one round; a round that is not ok ends the case."""
        outcomes = sorted(reply.outcomes, key=lambda outcome: outcome["rank"])
        self._rounds.append(outcomes)
        self._wall_s += wall_s
        if not reply.healthy and reply.fault is None:
            # The first rank to give up knows why; the others then fail for want of that rank.
            outcomes = [item for item in reply.outcomes if item["status"] != "ok"][:1]
        self._status = max((item["status"] for item in outcomes), key=STATUSES.index, default="ok")
        if self._status != "ok":
            self._error = _first_error(outcomes, self._status)
        if reply.fault is not None or (not reply.healthy and not outcomes):
            self._status = reply.fault or "failed"
            self._error = {"message": reply.message, "log": log_tail}
        self.ended = self._status != "ok"

    def give_up(self, status: str, message: str) -> None:
        """End the case from outside."""
        self._status, self._error = status, {"message": message}
        self.ended = True

    def to_record(self) -> Record:
        case = self.case
        record = Record(
            case_id=case.id,
            case=case.to_dict(),
            status=self._status,
            error=self._error,
            work={name: asdict(work) for name, work in case.task.work(case).items()},
            environment=self.environments[0] if self.environments else {},
            started_at=self._started_at[0],
            wall_s=self._wall_s,
        )
        record.notes["predicted_memory"] = case.task.predicted_memory(case)
        if self._num_rounds > 1:
            record.notes["interleaved_rounds"] = self._num_rounds
            record.notes["rounds_started_at"] = self._started_at
        if self._num_taken_up:
            record.notes["resumed_rounds"] = self._num_taken_up
        complete = [outcomes for outcomes in self._rounds if len(outcomes) == case.world_size]
        if not complete:
            return record
        first = complete[0]
        record.check = _worst_check([outcome["check"] for outcome in first])
        record.compilation = _worst_compilation(complete)
        record.memory = [
            _merge_max([outcomes[rank]["memory"] for outcomes in complete])
            for rank in range(case.world_size)
        ]
        record.device_state = [
            {
                "before": complete[0][rank]["device_state"].get("before", {}),
                "after": complete[-1][rank]["device_state"].get("after", {}),
            }
            for rank in range(case.world_size)
        ]
        record.notes |= complete[-1][0]["notes"]
        for name, clock in first[0]["clocks"].items():
            per_rank = [
                [
                    sample
                    for outcomes in complete
                    for sample in outcomes[rank]["samples_ms"].get(name, [])
                ]
                for rank in range(case.world_size)
            ]
            record.phases[name] = Phase(clock=clock, samples_ms=per_rank)
            record.rounds = [len(outcomes[0]["samples_ms"].get(name, [])) for outcomes in complete]
        return record


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Deliver signals to stop after this, not in the middle of it."""
    if threading.current_thread() is not threading.main_thread():
        # Handlers run in the main thread, and only it may set them.
        yield
        return
    held: list[int] = []
    # A mask would not do: it is the thread's own, and the signal then arrives in another one.
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


@contextlib.contextmanager
def exclusive_device(device: str, on_wait: Callable[[], object]) -> Iterator[None]:
    """Keep other runs on this host off the device: two that measure at once spoil each other.

    A lock in the temporary folder, which the operating system drops when its holder dies.
    Runs that see different GPUs (CUDA_VISIBLE_DEVICES) do not wait for each other. In a Slurm
    job that variable may count from 0 whichever GPUs the job has; Slurm's own tells them apart.
    """
    visible = ""
    if device == "cuda":
        names = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
        visible = next((os.environ[name] for name in names if name in os.environ), "all")
    name = re.sub(r"[^a-z0-9]+", "_", f"{device} {visible}".lower())
    path = Path(tempfile.gettempdir()) / f"attnbench_{name}.lock"
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError:
        # A temporary folder that cannot be written is no reason not to measure.
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def comparison_groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that differ in attention or strategy alone, together, in the order of the first.

    All cases of a group have as many ranks, and so one worker group. A strategy that trains on
    one rank does nothing, and has nothing to be compared with.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        values = case.to_dict() | {"world_size": case.world_size}
        del values["attention"]
        if case.parallel.dp > 1:
            del values["parallel"]
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(case)
    return list(groups.values())


def _first_error(outcomes: list[dict[str, Any]], status: str) -> dict[str, Any] | None:
    if status == "unsupported" and all(item["status"] == status for item in outcomes):
        # The same reason on every rank; none of them is to blame.
        return dict(outcomes[0]["error"])
    for outcome in outcomes:
        if outcome["status"] == status and outcome["error"]:
            error = dict(outcome["error"])
            if len(outcomes) > 1 or "vote" in outcome["notes"]:
                error["message"] = f"rank {outcome['rank']}: {error['message']}"
            return error
    return None


def _merge_max(per_round: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for values in per_round:
        for key, value in values.items():
            old = merged.get(key)
            merged[key] = max(old, value) if isinstance(old, int | float) else value
    return merged


def _worst_check(checks: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    done = [check for check in checks if check]
    if not done:
        return None
    errors = _merge_max([check["errors"] for check in done])
    return {"errors": errors, "tolerance": done[0]["tolerance"]}


def _worst_compilation(complete: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The first round's times, in which things compile, and every round's recompilations."""
    merged = _merge_max([outcome["compilation"] for outcome in complete[0]])
    merged["recompilations"] = max(
        outcome["compilation"].get("recompilations", 0)
        for outcomes in complete
        for outcome in outcomes
    )
    return merged
