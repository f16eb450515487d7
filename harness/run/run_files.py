"""The run files: their types, and how they are read from a folder that anybody may have written.

A file is read only if it is a regular one of reasonable size, and used only if every field has its
type and the lists fit together; otherwise the error is one line that names the file.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from harness.cases.case import Case
from harness.run.processes import MAX_PID, ProcessIdentity
from harness.run.rounds.options import RunOptions
from harness.store.codec import T, decode
from harness.store.regular import read_regular

SCHEMA = 1

LATEST_S = 1e11
"""Some three thousand years; what is no time of a run is beyond it, or not a number."""

LONGEST_S = 1e10
"""What a prediction beyond three hundred years is written as."""

CASE_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
JOB_ID = re.compile(r"[0-9]{1,20}(_[0-9]{1,20})?")

_ADDED = frozenset({"process", "attempts_before", "since_monotonic_s"})
"""Fields that files from before they were kept do not have."""


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
    process: ProcessIdentity | None = None
    """The identity of ``pid``; None in older files, and where jobs run the cases."""
    attempts_before: dict[str, int] | None = None
    """The newest attempt of each case that had one when the run began; None in older files."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _require(1 <= self.pid <= MAX_PID, f"pid {self.pid} is no process")
        _require(abs(self.created_s) < LATEST_S, "created_s is no time")
        _require(abs(self.clock_offset_s) < LATEST_S, "clock_offset_s is no time")
        lengths = [len(case_ids) for case_ids in self.case_ids]
        predicted = [len(seconds) for seconds in self.predicted_s]
        _require(lengths == predicted, "case_ids and predicted_s differ in length")
        for name in ("jobs", "shapes"):
            number = len(getattr(self, name))
            _require(number in (0, len(lengths)), f"case_ids and {name} differ in length")
        every_s = [second for seconds in self.predicted_s for second in seconds]
        _require(all(0 <= second < LATEST_S for second in every_s), "predicted_s is no time")
        names = [name for case_ids in self.case_ids for name in case_ids]
        _require(all(map(CASE_ID.fullmatch, names)), "case_ids holds what is no case's id")
        jobs = [job for job in self.jobs if job is not None]
        _require(all(map(JOB_ID.fullmatch, jobs)), "jobs holds what is no job's id")

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
    since_monotonic_s: float | None = None
    """``since_s`` by the kernel's clock that cannot be set; None in older files."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name in ("since_s", "started_s", "clock_offset_s", "since_monotonic_s"):
            seconds = getattr(self, name)
            _require(seconds is None or abs(seconds) < LATEST_S, f"{name} is no time")


class ShareFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The frozen input of one task."""

    options: dict[str, Any]
    files_before: list[str]
    cases: list[dict[str, Any]]
    schema: int = SCHEMA

    def typed(self) -> tuple[list[Case], RunOptions, set[str]]:
        """The cases, the options, and the records that existed; ValueError if one is none."""
        return _cases(self.cases), _options(self.options), set(self.files_before)


def writable_s(predicted_s: float) -> float:
    """A prediction as a run file takes it: at most :data:`LONGEST_S`, and 0 for none."""
    return min(predicted_s, LONGEST_S) if math.isfinite(predicted_s) else 0.0


def read_file(kind: type[T], path: Path) -> T:
    """The struct in a file; ValueError with one line that names the file, or OSError."""
    try:
        return decode(read_bytes(path), kind, schema=SCHEMA, may_lack=_ADDED)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def read_bytes(path: Path) -> bytes:
    """The content of a regular file, without waiting for anyone to write it.

    Raises ValueError for a link, a pipe, a device, or a file beyond all reason.
    """
    if path.is_symlink():
        # No run writes one, and it may lead out of the folder.
        raise ValueError("a link, not a regular file")
    try:
        return read_regular(path)[0]
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error


def _cases(values: list[dict[str, Any]]) -> list[Case]:
    try:
        return [Case.from_dict(case) for case in values]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"cases: {error}") from error


def _options(values: dict[str, Any]) -> RunOptions:
    known = {field.name for field in fields(RunOptions)}
    if unknown := set(values) - known:
        raise ValueError(
            f"options: no option {', '.join(sorted(unknown))} in this version; use the attnbench "
            "that wrote it"
        )
    return msgspec.convert(values, RunOptions, dec_hook=lambda kind, value: kind(value))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
