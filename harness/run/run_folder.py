"""The runs of a results folder: which process or job measures which case, since when, and where.

``runs/ID/run.json`` lists the cases of a run in shares and is written by the command that starts
it. ``runs/ID/share-N.json`` is the frozen input of one task of a job array: its cases and options
at submission, so that editing YAML afterwards changes nothing. ``runs/ID/state-N.json`` is the
state of that task, which it alone writes. All are replaced in one step, so that
``attnbench-status`` can read them at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from harness.cases.case import Case
from harness.run.launcher import PendingCases
from harness.run.options import RunOptions
from harness.run.progress import Progress
from harness.store import atomic
from harness.store.codec import T, decode, encode
from harness.store.record import Record

SCHEMA = 1


class RunManifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The cases that one command measures, in shares."""

    id: str
    launcher: str
    command: str
    created_s: float
    """Seconds since the epoch, by the clock of ``host``."""
    host: str
    pid: int
    clock_offset_s: float
    """Seconds by which this host's clock is ahead of the results folder's file system."""
    case_ids: list[list[str]]
    """The ids of each share's cases."""
    predicted_s: list[list[float]]
    jobs: list[str | None] = []
    """Each share's Slurm job, such as ``123_4``; None before it is submitted."""
    shapes: list[str] = []
    """Each share's resources, as text."""
    schema: int = SCHEMA

    @property
    def is_submitted(self) -> bool:
        """Whether Slurm's jobs run the shares; otherwise the process ``pid`` of ``host`` does."""
        return bool(self.jobs)


class TaskState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The state of one share."""

    event: str = "running"
    """running, stopped (on request, with cases left), ended, or failed."""
    job: str = ""
    node: str = ""
    restart: int = 0
    """How often Slurm has started the task again."""
    case_id: str | None = None
    """The case that is being measured, or was when the task stopped."""
    since_s: float = 0.0
    started_s: float = 0.0
    num_measured: int = 0
    clock_offset_s: float = 0.0
    error: str | None = None
    schema: int = SCHEMA


class RunFolder:
    """``runs/ID`` of a results folder."""

    def __init__(self, results: Path, run_id: str) -> None:
        self.results = results
        self.path = results / "runs" / run_id

    @property
    def jobs(self) -> Path:
        """The folder that Slurm and submitit write to."""
        return self.path / "jobs"

    def write_run(self, run: RunManifest) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        atomic.replace(self.path / "run.json", encode(run))

    def read_run(self) -> RunManifest:
        """The manifest; ValueError or OSError if there is none that can be read."""
        return _read(RunManifest, self.path / "run.json")

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
        """The cases, the options, and the records that existed at submission."""
        values = json.loads((self.path / f"share-{index}.json").read_text(encoding="utf-8"))
        options = values["options"] | {"results": Path(values["options"]["results"])}
        cases = [Case.from_dict(case) for case in values["cases"]]
        return cases, RunOptions(**options), set(values["files_before"])

    def write_state(self, index: int, state: TaskState) -> None:
        atomic.replace(self.path / f"state-{index}.json", encode(state))

    def read_state(self, index: int) -> TaskState | None:
        """The state of a share; None if its task has not started."""
        try:
            return _read(TaskState, self.path / f"state-{index}.json")
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def new_run_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"


def runs_of(results: Path) -> list[tuple[RunFolder, RunManifest]]:
    """Every readable run of a results folder, oldest first."""
    found = []
    for path in (results / "runs").glob("*/run.json"):
        folder = RunFolder(results, path.parent.name)
        # The run is being removed, or was written by another version.
        with contextlib.suppress(OSError, ValueError):
            found.append((folder, folder.read_run()))
    return sorted(found, key=lambda item: item[1].created_s)


@contextlib.contextmanager
def planning_lock(results: Path) -> Iterator[None]:
    """Let one command at a time decide what to submit, so that no case is submitted twice."""
    (results / "runs").mkdir(parents=True, exist_ok=True)
    fd = os.open(results / "runs" / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
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
        self.write()
        if self._inner is not None:
            self._inner.started(case)

    def stage(self, name: str) -> None:
        if self._inner is not None:
            self._inner.stage(name)

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
    folder = RunFolder(results, new_run_id())
    run = RunManifest(
        id=folder.path.name,
        launcher=launcher,
        command=pending.command,
        created_s=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        clock_offset_s=0.0,
        case_ids=[[case.id for case in pending.cases]],
        predicted_s=[[pending.predict(case) for case in pending.cases]],
    )
    for other, their in runs_of(results):
        if not their.is_submitted and their.host == run.host and not is_running(their):
            other.remove()
    folder.write_run(run)
    state = TaskState(node=run.host, started_s=run.created_s)
    try:
        yield StateProgress(folder, 0, state, pending.progress)
    finally:
        folder.remove()


def is_running(run: RunManifest) -> bool:
    """Whether the process of a local run still lives; on another host it is assumed to."""
    if run.host != socket.gethostname():
        return True
    try:
        return psutil.Process(run.pid).create_time() <= run.created_s + 1
    except psutil.Error:
        return False


def _read(kind: type[T], path: Path) -> T:
    try:
        return decode(path.read_bytes(), kind, schema=SCHEMA)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
