"""The runs of a results folder: which process or job measures which case, since when, and where.

``runs/ID/run.json`` lists the cases of a run in shares and is written by the command that starts
it. ``runs/ID/share-N.json`` is the frozen input of one task of a job array: its cases and options
at submission, so that editing YAML afterwards changes nothing. ``runs/ID/state-N.json`` is the
state of that task, which it alone writes. All are replaced in one step, so that
``attnbench-status`` can read them at any time. ``runs/ID/lock`` is locked by the process of a
local run for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.cases.case import Case
from harness.printing import warn
from harness.run import unfinished
from harness.run.launcher import PendingCases
from harness.run.processes import is_same_process, own_identity, take_lock
from harness.run.progress import Progress
from harness.run.rounds.options import RunOptions
from harness.run.run_files import (
    SCHEMA,
    RunManifest,
    ShareFile,
    TaskState,
    read_file,
    writable_s,
)
from harness.store import atomic
from harness.store.codec import encode
from harness.store.record import Record, RecordStore, file_case


class RunFolder:
    """``runs/ID`` of a results folder."""

    def __init__(self, results: Path, run_id: str) -> None:
        self.results = results
        self.path = results / "runs" / run_id

    @property
    def jobs(self) -> Path:
        """The folder that Slurm and submitit write to."""
        return self.path / "jobs"

    @property
    def lock(self) -> Path:
        """The file that the process of a local run keeps locked."""
        return self.path / "lock"

    def write_run(self, run: RunManifest) -> None:
        atomic.replace(self.path / "run.json", encode(run))

    def read_run(self) -> RunManifest:
        """The manifest; ValueError or OSError if there is none that can be read."""
        run = read_file(RunManifest, self.path / "run.json")
        if run.id != self.path.name:
            raise ValueError(f"{self.path / 'run.json'}: of another run, {run.id[:80]!r}")
        return run

    def write_share(
        self, index: int, cases: list[Case], options: RunOptions, files_before: list[str]
    ) -> None:
        values = {
            "schema": SCHEMA,
            "options": asdict(options) | {"results": str(options.results)},
            "files_before": files_before,
            "cases": [case.to_dict() for case in cases],
        }
        atomic.replace(self.path / f"share-{index}.json", json.dumps(values).encode())

    def read_share(self, index: int) -> tuple[list[Case], RunOptions, set[str]]:
        """The cases, the options, and the records that existed at submission.

        The options' results folder is this one, whatever the file says.
        Raises ValueError with one line, or OSError.
        """
        path = self.path / f"share-{index}.json"
        share = read_file(ShareFile, path)
        try:
            cases, options, files_before = share.typed()
        except ValueError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
        return cases, replace(options, results=self.results), files_before

    def write_state(self, index: int, state: TaskState) -> None:
        atomic.replace(self.path / f"state-{index}.json", encode(state))

    def read_state(self, index: int) -> TaskState | None:
        """The state of a share; None if its task has not started."""
        try:
            return read_file(TaskState, self.path / f"state-{index}.json")
        except FileNotFoundError:
            return None

    def is_running(self, run: RunManifest) -> bool:
        """Whether the process of a local run lives; where nobody can tell it is assumed to."""
        return is_same_process(run.host, run.pid, run.process, self.lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def new_run_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def runs_of(results: Path) -> list[tuple[RunFolder, RunManifest]]:
    """Every readable run of a results folder, oldest first."""
    return read_runs(results)[0]


def read_runs(results: Path) -> tuple[list[tuple[RunFolder, RunManifest]], list[str]]:
    """Every readable run, oldest first, and one line for each run file that is set aside."""
    found: list[tuple[RunFolder, RunManifest]] = []
    problems: list[str] = []
    for path in _run_folders(results):
        folder = RunFolder(results, path.name)
        try:
            found.append((folder, folder.read_run()))
        except FileNotFoundError:
            # It is being written or removed.
            continue
        except OSError as error:
            problems.append(f"{path / 'run.json'}: set aside: {error.strerror}")
        except ValueError as error:
            problems.append(str(error).replace("run.json: ", "run.json: set aside: ", 1))
    return sorted(found, key=lambda item: item[1].created_s), sorted(problems)


def _run_folders(results: Path) -> list[Path]:
    try:
        return [path for path in (results / "runs").iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


@contextlib.contextmanager
def planning_lock(results: Path) -> Iterator[None]:
    """Let one command at a time decide what to submit, so that no case is submitted twice."""
    (results / "runs").mkdir(parents=True, exist_ok=True)
    path = results / "runs" / ".lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path}: not a regular file")
        fcntl.lockf(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def clock_offset_s(folder: Path) -> float:
    """Seconds by which this host's clock is ahead of the one that stamps files in ``folder``.

    On a shared file system that is the server's clock, so the offsets of two hosts compare
    their clocks.
    """
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp") as file:
        before = time.time()
        file.write(b" ")
        file.flush()
        os.fsync(file.fileno())
        stamped = os.stat(file.name).st_mtime
        return (before + time.time()) / 2 - stamped


class StateProgress:
    """A progress that also keeps a share's state file up to date."""

    def __init__(
        self, folder: RunFolder, index: int, state: TaskState, inner: Progress | None = None
    ) -> None:
        self.state = state
        self._folder = folder
        self._index = index
        self._inner = inner

    def started(self, case: Case) -> None:
        self.state.case_id = case.id
        self.state.since_s = time.time()
        self.state.since_monotonic_s = time.monotonic()
        self.write()
        if self._inner is not None:
            self._inner.started(case)

    def stage(self, name: str) -> None:
        if self._inner is not None:
            self._inner.stage(name)

    def left_out(self, case: Case) -> None:
        self.state.case_id = None
        if self._inner is not None:
            self._inner.left_out(case)

    def finished(self, record: Record, *, measured_now: bool) -> None:
        self.state.num_measured += measured_now
        self.state.case_id = None
        if self._inner is not None:
            self._inner.finished(record, measured_now=measured_now)

    def write(self, event: str | None = None, error: str | None = None) -> None:
        """Write the state; a full results folder must not end the measuring."""
        self.state.event = event or self.state.event
        self.state.error = error or self.state.error
        with contextlib.suppress(OSError):
            self._folder.write_state(self._index, self.state)


@contextlib.contextmanager
def local_run(pending: PendingCases, launcher: str) -> Iterator[Progress]:
    """Announce a local run in the results folder for as long as it measures."""
    results = pending.options.results
    _remove_ended(results)
    with contextlib.ExitStack() as releases:
        try:
            folder, locked = _create(results, releases)
            run = _manifest(pending, folder.path.name, launcher, locked=locked)
            folder.write_run(run)
        except OSError as error:
            warn(
                f"{results / 'runs'}: cannot be written ({error.strerror}); this run "
                "measures, and attnbench-status does not show it"
            )
            yield pending.progress
            return
        state = TaskState(node=run.host, started_s=run.created_s)
        yield StateProgress(folder, 0, state, pending.progress)


def _create(results: Path, releases: contextlib.ExitStack) -> tuple[RunFolder, bool]:
    """A new run folder, and whether its lock is held; both end with ``releases``."""
    folder, lock = _made(results)
    releases.callback(folder.remove)
    if lock is not None:
        releases.callback(os.close, lock)
    return folder, lock is not None


@contextlib.contextmanager
def submitted_run(results: Path) -> Iterator[RunFolder]:
    """A new folder for a run of jobs, which no other command removes while this one submits them,
    however long that takes."""
    folder, lock = _made(results)
    try:
        folder.jobs.mkdir()
        yield folder
    finally:
        # Jobs outlive whoever submits them: nobody asks for this lock once the run file is there.
        with contextlib.suppress(OSError):
            folder.lock.unlink()
        if lock is not None:
            os.close(lock)


def _made(results: Path) -> tuple[RunFolder, int | None]:
    """A new run folder, and its lock, which is None where the file system has none."""
    (results / "runs").mkdir(parents=True, exist_ok=True)
    folder = RunFolder(results, new_run_id())
    with unfinished.being_made(results / "runs"):
        folder.path.mkdir()
        return folder, take_lock(folder.lock)


def _manifest(pending: PendingCases, run_id: str, launcher: str, *, locked: bool) -> RunManifest:
    predicted_s = [pending.predict(case) for case in pending.cases]
    return RunManifest(
        id=run_id,
        launcher=launcher,
        command=pending.command,
        created_s=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        clock_offset_s=0.0,
        case_ids=[[case.id for case in pending.cases]],
        predicted_s=[list(map(writable_s, predicted_s))],
        process=own_identity(locked=locked),
        attempts_before=attempts(pending.store, {case.id for case in pending.cases}),
    )


def _remove_ended(results: Path) -> None:
    """Remove what local runs of this host have left that were killed."""
    unfinished.remove(results / "runs")
    for folder, run in runs_of(results):
        if not run.is_submitted and not folder.is_running(run):
            folder.remove()


def attempts(store: RecordStore, case_ids: Container[str]) -> dict[str, int]:
    """The number of the newest attempt at each of these cases that has one."""
    newest: dict[str, int] = {}
    for name in store.names():
        found = file_case(name)
        if found is not None and found[0] in case_ids:
            newest[found[0]] = max(found[1], newest.get(found[0], 0))
    return newest
