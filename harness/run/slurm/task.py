"""A task of a job array: measures its share on the nodes that Slurm gave it.

submitit calls :class:`ShareTask` once for every rank. Rank 0 leads: it runs the same runner as
the local launcher over the share's cases; every other rank is an agent that starts its worker.
Each case is recorded when it is measured, and each round of an interleaved one kept, so a task
that must stop has little to save: it writes its state, asks to be requeued, and continues with the
rest when it starts again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import submitit
from submitit.helpers import DelayedSubmission

from harness.cases.case import Case
from harness.printing import say
from harness.run.nodes.agent import serve_agent
from harness.run.nodes.hosts import CLOCK_TOLERANCE_S, HostError, Hosts, clocks_differ
from harness.run.nodes.secret import SECRET_FILE, derived_key, read_secret
from harness.run.run_folder import RunFolder, StateProgress, TaskState, clock_offset_s
from harness.run.runner import Runner
from harness.run.slurm import commands as slurm
from harness.run.workers.worker_group import WorkerStartError
from harness.store.record import RecordStore


@dataclass(slots=True)
class ShareTask:
    """The picklable function of one array task; submitit calls ``checkpoint`` before its end."""

    results: str
    run_id: str
    index: int
    ranks_per_node: int
    time_min: int
    stop_s: int
    _leader: Leader | None = field(default=None, repr=False)

    def __call__(self) -> str:
        # The start of this process has held it; submitit's handler is in place by now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        environment = submitit.JobEnvironment()
        folder = RunFolder(Path(self.results), self.run_id)
        if environment.global_rank > 0:
            try:
                return f"started {self._serve(folder, environment.global_rank)} workers"
            except HostError as error:
                sys.exit(f"attnbench: {error}")
        self._leader = Leader(self, folder)
        return self._leader.lead(environment)

    def _serve(self, folder: RunFolder, rank: int) -> int:
        logs = folder.results / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        address, port = endpoint()
        return serve_agent(
            address=address, port=port, rank=rank, key=self.key(), run=self.run_id, logs=logs
        )

    def key(self) -> bytes:
        """By which the ranks of this task know each other; it is of no use to another task's."""
        try:
            secret = read_secret(RunFolder(Path(self.results), self.run_id).path / SECRET_FILE)
        except OSError as error:
            raise HostError(
                f"{error.filename}: cannot be read ({error.strerror}); submit the cases again"
            ) from error
        return derived_key(secret, f"task {self.index} of job {os.environ.get('SLURM_JOB_ID')}")

    def checkpoint(self) -> DelayedSubmission | None:
        """The task to run when the job restarts; called in the signal's handler."""
        if self._leader is not None:
            self._leader.told_to_stop()
        values = (self.results, self.run_id, self.index, self.ranks_per_node)
        return DelayedSubmission(ShareTask(*values, self.time_min, self.stop_s))


class Leader:
    """Rank 0 of a task."""

    def __init__(self, task: ShareTask, folder: RunFolder) -> None:
        self._task = task
        self._folder = folder
        self._started_s = time.time()
        self._runner: Runner | None = None
        self._progress: _Watchful | None = None

    def lead(self, environment: submitit.JobEnvironment) -> str:
        """Measure the share; returns a line for the job's log."""
        # submitit would ignore it; Slurm would then kill this process before it ends its workers.
        signal.signal(signal.SIGTERM, self._terminated)
        task = self._task
        state = TaskState(
            job=environment.job_id,
            node=",".join(environment.hostnames),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            started_s=self._started_s,
            since_s=self._started_s,
            clock_offset_s=clock_offset_s(self._folder.path),
        )
        self._progress = _Watchful(self._folder, task.index, state)
        self._progress.write()
        try:
            cases, options, files_before = self._folder.read_share(task.index)
            ours = self._folder.read_run().clock_offset_s
        except (ValueError, OSError) as error:
            self._fail(error)
        apart_s = state.clock_offset_s - ours
        if abs(apart_s) > CLOCK_TOLERANCE_S:
            say(f"attnbench: {clocks_differ(state.node, apart_s)}")
        store = RecordStore(options.results)
        address, port = endpoint()
        try:
            with Hosts.gathered(
                address=address,
                port=port,
                world_size=environment.num_tasks,
                local_ranks=1,
                ranks_per_node=task.ranks_per_node,
                key=task.key() if environment.num_tasks > 1 else b"",
                run=task.run_id,
            ) as hosts:
                for warning in hosts.warnings:
                    say(f"attnbench: {warning}")
                self._runner = Runner(options, store, self._progress, hosts)
                self._runner.run(cases, files_before)
        except (HostError, WorkerStartError, OSError) as error:
            self._fail(error)
        except _Superseded:
            return "this task has been started again elsewhere, which goes on with its cases"
        self._progress.write("ended")
        return f"measured {state.num_measured} of {len(cases)} cases"

    def _fail(self, error: Exception) -> NoReturn:
        message = " ".join(str(error).split())
        if self._progress is not None:
            self._progress.write("failed", message)
        sys.exit(f"attnbench: {message}")

    def told_to_stop(self) -> None:
        """Write the state as stopped: the task is preempted, or its time limit is near."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._runner is None or self._progress is None:
            return
        if self._time_is_up() and self._progress.num_started <= 1:
            # It had the job's whole time limit; restarting it would end the same way.
            self._runner.give_up_current(
                "timeout", f"not done within launcher.time_min={self._task.time_min} of a whole job"
            )
        self._progress.write("stopped")

    def _time_is_up(self) -> bool:
        end_s = float(
            os.environ.get("SLURM_JOB_END_TIME", self._started_s + 60 * self._task.time_min)
        )
        return end_s - time.time() < self._task.stop_s + slurm.WARNS_EARLY_S

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: cancelled, or preempted by a Slurm that requeues by itself."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._progress is not None:
            self._progress.write("stopped")
        sys.exit(128 + number)


class _Superseded(Exception):
    """Slurm considered this node dead and has restarted the task on another one."""


class _Watchful(StateProgress):
    """Stops the run if a later start of the same task has written its state."""

    num_started = 0
    """Rounds that began; an uninterleaved case is one round."""

    def started(self, case: Case) -> None:
        newest = None
        # A state that cannot be read is no reason to stop measuring.
        with contextlib.suppress(OSError, ValueError):
            newest = self._folder.read_state(self._index)
        if newest is not None and newest.restart > self.state.restart:
            raise _Superseded
        self.num_started += 1
        super().started(case)


def endpoint() -> tuple[str, int]:
    """The address and port of rank 0, which every task derives from Slurm's environment."""
    environment = submitit.JobEnvironment()
    # The node that runs the batch script and srun is the job's first, and so rank 0's.
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or environment.hostnames[0]
    port = random.Random(os.environ.get("SLURM_JOB_ID", "0")).randint(20_000, 32_000)
    return address, port
