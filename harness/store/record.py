"""Records: one write-once JSON file per measured case, and the folder that holds them.

A record keeps what was observed, sample by sample and rank by rank, and nothing derived:
medians, rates and ratios are computed when a table is built. A record file is complete or
absent (it is written aside and linked into place), is never rewritten, and is never deleted;
a case measured again gets the next attempt number, and the newest with a verdict counts
(:func:`harness.statuses.that_counts`).
``attnbench-pack`` moves files into archives (:mod:`harness.store.archive`), where they are found
under the same names.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from harness.escapes import printable
from harness.statuses import GOOD, STATUSES
from harness.store import atomic, rescue
from harness.store.archive import Archives
from harness.store.attempts import Records
from harness.store.claims import Claims
from harness.store.codec import T, decode, decoding_many, encode
from harness.store.regular import read_regular, unlisted
from harness.store.shape import CaseOptions, RecordShape
from harness.store.shape_types import Milliseconds

SCHEMA = 1

_ADDED = frozenset({"round_states", "stopped", "source", "checking_s"})
"""Fields that records from before they were kept do not have."""


class RecordError(ValueError):
    """A record file that cannot be read; the message is one line that names the file."""


class Phase(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Samples of one timed phase, in the order they were taken."""

    clock: str
    """``host`` (perf_counter around a synchronised region) or ``cuda_event``."""
    samples_ms: list[list[Milliseconds]]
    """One list per rank."""
    host_ms: list[list[Milliseconds]] = []
    """How long the host took to enqueue the same passes, one list per rank; CUDA only. Of passes in
    a row, which fill the launch queue, instead of a few further ones from an idle device."""
    device_ms: list[list[Milliseconds]] = []
    """Further passes, of which the device started none before the host had enqueued it whole, one
    list per rank; CUDA only. What ``samples_ms`` take longer, the device waited for its host."""


class Round(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The circumstances of one round of a case."""

    started_at: str
    """When the case's turn in the round began; cases take their turns in random order."""
    process: int
    """Which of the run's worker processes measured it: rounds of equal numbers shared one."""
    ranks: list[dict[str, Any]] = []
    """By rank: the device's state ``before`` and ``after`` it, and the host's ``load``."""


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The observations of one case. See ``results/README.md`` for the JSON."""

    case_id: str
    case: dict[str, Any]
    status: str
    error: dict[str, Any] | None = None
    """``message`` in one line, and where known ``traceback``, ``rank``, ``stage``."""
    phases: dict[str, Phase] = {}
    rounds: list[int] = []
    """Measured passes per interleaved round; a single entry when not interleaved."""
    round_states: list[Round] = []
    """The circumstances of each round; empty in records from before they were kept."""
    stopped: str = ""
    """Why no further rounds were measured, where that was decided while measuring."""
    source: dict[str, str] = {}
    """Hashes of the source files that the case runs, by folder: its kernel, scheme, strategy, model
    and task; empty in records from before they were kept."""
    memory: list[dict[str, Any]] = []
    """One mapping per rank, of byte counts and their ``source``."""
    work: dict[str, dict[str, Any]] = {}
    """flops, bytes, tokens per phase by formula."""
    check: dict[str, Any] | None = None
    """Relative errors against float64 and their tolerance."""
    checking_s: list[float] = []
    """Seconds that the numeric gate took in each round, on the slowest rank, without what its calls
    compiled; beside ``wall_s`` the gate's share. Empty in records from before it was kept."""
    compilation: dict[str, Any] = {}
    """first_pass_s, compile_s, autotune_s, and recompilations inside the measured window."""
    notes: dict[str, Any] = {}
    """Further observations of the task, such as the loss."""
    device_state: list[dict[str, Any]] = []
    """Clocks, power and throttle reasons per rank, before and after."""
    environment: dict[str, Any] = {}
    started_at: str = ""
    wall_s: float = 0.0
    attempt: int = 1
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        require_status(self.status)

    def to_json(self) -> str:
        """The text of the record's file, with sorted keys."""
        return encode(self, indent=1, sort_keys=True).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Decode a record; ValueError if the text is not a complete one of this schema."""
        return _decoded(text.encode(), cls)


def _decoded(data: bytes, kind: type[T]) -> T:
    """The fields of a record's file that ``kind`` has. Raises ValueError."""
    if kind is not Record:
        return decode(data, kind, schema=SCHEMA, may_lack=_ADDED)
    found = decode(data, kind, schema=SCHEMA, may_lack=_ADDED, shape=RecordShape)
    assert isinstance(found, Record)
    try:
        msgspec.convert({"case": found.case}, CaseOptions)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    for name, phase in found.phases.items():
        for ranks in (phase.samples_ms, phase.host_ms, phase.device_ms):
            if len(ranks) > 1 and len(set(map(len, ranks))) > 1:
                raise ValueError(f"phases.{name}: ranks have other numbers of samples")
    return found


def _storable(record: Record) -> Record:
    """A record that can be read again: of one that cannot, how the case ended and why."""
    try:
        Record.from_json(record.to_json())
    except ValueError as error:
        ended = Record(
            case_id=record.case_id,
            case=record.case,
            status="failed",
            error={"message": f"what was observed cannot be kept: {error}"[:1000]},
            environment=record.environment,
            started_at=record.started_at,
            wall_s=record.wall_s,
        )
        with contextlib.suppress(ValueError):
            return Record.from_json(ended.to_json())
    return record


def require_status(status: str) -> None:
    """Raise ValueError unless records can have this status."""
    if status not in STATUSES:
        raise ValueError(f"status {status}: one of {', '.join(STATUSES)}")


def is_final(record: Record, *, retry: bool) -> bool:
    """Whether a record stands, so that its case need not be measured again."""
    return record.status in GOOD or not retry


_FILE_NAME = re.compile(r"(?P<case_id>.+?)(?:\.(?P<attempt>\d+))?\.json")


def file_case(name: str) -> tuple[str, int] | None:
    """The case id and attempt in the name of a record's file; None for other files."""
    match = _FILE_NAME.fullmatch(name)
    return (match["case_id"], int(match["attempt"] or 1)) if match else None


def is_file(name: str) -> bool:
    """Whether a record's file can have this name."""
    return _FILE_NAME.fullmatch(name) is not None and "/" not in name


def _require_name(name: str, found: msgspec.Struct) -> None:
    """Raise ValueError if the fields of a record are of another case than its file's name."""
    case_id, number = file_case(name) or ("", 1)
    said = getattr(found, "case_id", case_id)
    if said != case_id:
        raise ValueError(f"it is of case {said[:200]}: rename it to that, or move it away")
    if isinstance(found, Record):
        # A record that was copied or moved to another attempt counts as that one.
        found.attempt = number


class RecordStore:
    """The records of one results folder.

    Several processes may share the folder: a case is claimed before it is measured, with a
    lock that the operating system drops when its holder dies.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self.folder = results / "records"
        self.archives = Archives(self.folder / "archive")
        self._claims = Claims(self.folder / ".lock")
        self._set_aside: dict[str, str] = {}

    def create(self) -> None:
        """Make the folder; OSError if it cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder):
            pass

    def path(self, case_id: str, attempt: int) -> Path:
        suffix = "" if attempt == 1 else f".{attempt}"
        return self.folder / f"{case_id}{suffix}.json"

    def place(self, case_id: str, attempt: int) -> Path:
        """Where a record lies: its file, or the archive that holds it."""
        path = self.path(case_id, attempt)
        return path if path.exists() else self.archives.holder(path.name) or path

    def names(self) -> dict[str, bytes | None]:
        """The names of all records' files, sorted; with its JSON where a record is archived alone.

        Safe while other processes write and pack: a file is complete from the moment it has a
        name, and goes only after an archive holds it.
        """
        # In this order: what is gone from the folder has been in an archive before.
        files = self.files()
        archived = self.archives.records()
        names = files | {name for name in archived if is_file(name)}
        return {name: None if name in files else archived[name] for name in sorted(names)}

    def files(self) -> set[str]:
        """The names of the records that are files."""
        return {name for name in self._listed() if is_file(name)}

    def attempts(self, case_id: str) -> list[int]:
        """Attempt numbers that have a file or a place in an archive, readable or not."""
        # Files first, as in names().
        files = [name for name in self._listed() if name.startswith(case_id)]
        archived = [name for name in self.archives.records() if name.startswith(case_id)]
        found = {file_case(name) for name in (*files, *archived)}
        return sorted(item[1] for item in found if item is not None and item[0] == case_id)

    def _listed(self) -> list[str]:
        """The folder's names; none where it cannot be read, which :meth:`problems` tells."""
        with contextlib.suppress(OSError):
            return os.listdir(self.folder)
        return []

    def problems(self) -> list[str]:
        """One line for each place of records that cannot be read."""
        return [*unlisted(self.folder), *self.archives.problems()]

    def read(self, path: Path) -> Record:
        """The record of a file in this folder, which may lie in an archive by now.

        RecordError if there is none.
        """
        return self.read_as(path.name, Record)[0]

    def read_as(
        self, name: str, kind: type[T], archived: bytes | None = None
    ) -> tuple[T, float | None]:
        """The fields of a record that ``kind`` has, and when its file was written.

        The time is by the file system's clock, and None of an archived record. Raises RecordError.

        Args:
            archived: what :meth:`names` has for the record.
        """
        path = self.folder / name
        try:
            data, written_s = (archived, None) if archived else self._data(path)
            found = _decoded(data, kind)
            _require_name(name, found)
            if name in self._set_aside:
                raise ValueError(self._set_aside[name])
        except (ValueError, OSError) as error:
            reason = (getattr(error, "strerror", None) or str(error) or "empty").splitlines()[0]
            raise RecordError(unreadable(path, reason)) from error
        return found, written_s

    def _data(self, path: Path) -> tuple[bytes, float | None]:
        try:
            return read_regular(path)
        except FileNotFoundError:
            if text := self.archives.records().get(path.name):
                return text, None
            raise

    def load(self) -> tuple[Records, list[str]]:
        """The record of every case that counts, and one line per unreadable file."""
        attempts, problems = self.load_attempts()
        return Records(attempts), problems

    def load_attempts(self) -> tuple[dict[tuple[str, int], Record], list[str]]:
        """Every readable record by case id and attempt, and one line per unreadable file."""
        found: dict[tuple[str, int], Record] = {}
        problems = self.problems()
        with decoding_many():
            for name, archived in self.names().items():
                try:
                    record, _ = self.read_as(name, Record, archived)
                except RecordError as error:
                    problems.append(str(error))
                    continue
                # The number in the file's name, whatever the record says.
                found[record.case_id, record.attempt] = record
        return found, problems

    def set_aside(self, record: Record, reason: str) -> str:
        """Read a record no more, for a reason that only a reader of its case knows; says so."""
        path = self.path(record.case_id, record.attempt)
        self._set_aside[path.name] = reason
        return unreadable(path, reason)

    def find(self, case_id: str) -> Record | None:
        """The newest readable attempt at one case, whether it counts or not."""
        for attempt in reversed(self.attempts(case_id)):
            with contextlib.suppress(RecordError):
                return self.read(self.path(case_id, attempt))
        return None

    def write(self, record: Record) -> Path:
        """Write the record under the next free attempt number; atomic, never overwrites.

        Raises OSError that names a file where the record was saved instead, if the results
        folder cannot take it.
        """
        record = _storable(record)
        try:
            return self._write(record)
        except OSError as error:
            name = self.path(record.case_id, 1).name
            where = rescue.keep(self.results, name, record.to_json().encode())
            raise OSError(
                f"{self.folder}: cannot write the record of {record.case_id} "
                f"({error.strerror}); {where}"
            ) from error

    def _write(self, record: Record) -> Path:
        taken = self.attempts(record.case_id)
        record.attempt = (taken[-1] + 1) if taken else 1
        while True:
            path = self.path(record.case_id, record.attempt)
            try:
                atomic.create(path, record.to_json().encode())
                return path
            except FileExistsError:
                record.attempt += 1

    def take_up_rescued(self) -> list[str]:
        """Bring records here that this folder could not take before; one line for each.

        Raises OSError if it still cannot.
        """
        lines = []
        with rescue.taking(self.results) as found:
            for kept in found:
                try:
                    record = Record.from_json(kept.data.decode())
                except ValueError:
                    continue
                if not self._has(record):
                    self._write(record)
                    lines.append(f"the rescued record of {record.case_id} is in {self.folder} now")
                kept.remove()
        return lines

    def _has(self, record: Record) -> bool:
        """Whether an attempt is this record, but for its number."""
        for number in self.attempts(record.case_id):
            with contextlib.suppress(RecordError):
                other = self.read(self.path(record.case_id, number))
                if msgspec.structs.replace(other, attempt=record.attempt) == record:
                    return True
        return False

    def claim(self, case_id: str, *, wait: bool) -> contextlib.AbstractContextManager[bool]:
        """Hold the right to measure a case; gives False if another process holds it.

        With ``wait`` it waits for the other process and then gives True.
        """
        return self._claims.one(case_id, wait=wait)

    def claim_all(self) -> contextlib.AbstractContextManager[bool]:
        """Hold the right to measure every case; gives False if another process holds any."""
        return self._claims.all()


def unreadable(path: Path, reason: str) -> str:
    """The line about a record's file that is not read."""
    return printable(f"{path}: not a readable record ({reason})")


def in_short(problems: list[str]) -> list[str]:
    """The lines about unreadable files, with one line for many that fail for one reason."""
    by_reason: dict[str, list[str]] = {}
    for problem in problems:
        by_reason.setdefault(problem.partition(": ")[2], []).append(problem)
    return [
        lines[0] if len(lines) == 1 else f"{lines[0]}; and {len(lines) - 1} more files like it"
        for lines in by_reason.values()
    ]
