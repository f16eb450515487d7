"""Packing: moves records from files into archives, one for each sweep, and back.

A record goes to the archive that has its case already, else to that of the first sweep that plans
it. A file is removed once the archive is on the disk and has been read back with every byte of
it; a process that is stopped before leaves files that are archived as well, which the next one
removes. Nothing leaves an archive but to become a file again.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.store import archive, atomic
from harness.store.record import Record, RecordError, RecordStore, file_case
from harness.store.regular import require_inside
from harness.store.sweep_plan import PlanError, planned_labels, read_plan

UNPLANNED = "unplanned"
"""The archive of records that no sweep plans any more."""


class PackingError(ValueError):
    """Why nothing was packed or unpacked, in one line."""


@dataclass(kw_only=True, slots=True)
class Packed:
    """The archives that were written, or unpacked and removed, and what was left as it is."""

    num_records: int = 0
    archives: list[Path] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """One line for each file that was not moved."""


def pack(store: RecordStore, labels: Sequence[str] = ()) -> Packed:
    """Move the records of the named sweeps, or all of them, from files into archives.

    Raises:
        PackingError: while a run measures, and where an archive cannot be read.
    """
    with _alone(store):
        packed = Packed()
        homes = _homes(store, packed.left)
        present = store.archives.records()
        waiting: dict[Path, dict[str, bytes]] = {}
        for name in sorted(store.files()):
            case_id, _ = file_case(name) or ("", 0)
            home = homes.get(case_id, UNPLANNED)
            if labels and home not in labels:
                continue
            try:
                text = _text_of(store, name, present.get(name))
            except (RecordError, PackingError) as error:
                packed.left.append(str(error))
                continue
            path = store.archives.folder / f"{home}{archive.SUFFIX}"
            waiting.setdefault(path, {})[name] = text
        for path, records in waiting.items():
            _add(path, records)
            for name in records:
                (store.folder / name).unlink()
            packed.archives.append(path)
            packed.num_records += len(records)
        return packed


def unpack(store: RecordStore) -> Packed:
    """Make all archived records files again, and remove the archives.

    Raises:
        PackingError: while a run measures, and where an archive cannot be read.
    """
    with _alone(store):
        packed = Packed()
        for path in store.archives.paths():
            records = archive.read(path)
            left = [line for name, text in records.items() if (line := _left(store, name, text))]
            packed.num_records += len(records) - len(left)
            if left:
                packed.left += [f"{line} {path}, which stays" for line in left]
                continue
            atomic.sync_folder(store.folder)
            path.unlink()
            packed.archives.append(path)
        with contextlib.suppress(OSError):
            store.archives.folder.rmdir()
        return packed


@contextlib.contextmanager
def _alone(store: RecordStore) -> Iterator[None]:
    """Keep runs from measuring meanwhile; they wait."""
    with store.claim_all() as alone:
        if not alone:
            raise PackingError(f"{store.results}: a run measures into it; pack when it has ended")
        if problems := store.archives.problems():
            raise PackingError(f"{problems[0]}; restore it first, or move it away")
        require_inside(store.archives.folder, store.results)
        with contextlib.suppress(FileNotFoundError):
            for path in store.archives.folder.glob(f"*{archive.SUFFIX}.*.tmp"):
                # A process that was killed has left it.
                with contextlib.suppress(OSError):
                    path.unlink()
        yield


def _homes(store: RecordStore, problems: list[str]) -> dict[str, str]:
    """The archive of each case: the one that has it, else that of the first sweep with it."""
    homes: dict[str, str] = {}
    for path in store.archives.paths():
        for name in archive.read(path):
            case_id, _ = file_case(name) or ("", 0)
            homes.setdefault(case_id, path.name.removesuffix(archive.SUFFIX))
    for label in planned_labels(store.results):
        try:
            plan = read_plan(store.results, label)
        except PlanError as error:
            problems.append(str(error))
            continue
        for case_id in plan.case_ids:
            homes.setdefault(case_id, label)
    return homes


def _text_of(store: RecordStore, name: str, archived: bytes | None) -> bytes:
    """The JSON of a record's file on one line. RecordError or PackingError if it must stay."""
    path = store.folder / name
    store.read_as(name, Record)
    try:
        text = archive.compact(path.read_bytes())
    except ValueError as error:
        raise PackingError(f"{path}: {error}; it stays a file") from error
    if archived is not None and archived != text:
        case_id, _ = file_case(name) or ("", 0)
        free = f"{case_id}.{max(store.attempts(case_id)) + 1}.json"
        raise PackingError(
            f"{path}: another record than the archived one; it stays a file (renamed to {free}, it "
            "is a further attempt, and both are kept)"
        )
    return text


def _add(path: Path, records: dict[str, bytes]) -> None:
    """Bring records into an archive, beside those that it has, and read it back."""
    present = archive.read(path) if path.exists() else {}
    together = present | records
    if together != present:
        path.parent.mkdir(exist_ok=True)
        atomic.replace(path, archive.to_bytes(together), sync=True)
        atomic.sync_folder(path.parent)
    found = archive.read(path)
    folder = path.parent.parent
    for name in records:
        if archive.expanded(found[name]) != (folder / name).read_bytes():
            raise PackingError(f"{path}: does not give back {name}; the files stay")
    if found != together:
        raise PackingError(f"{path}: does not give back what was written; the files stay")


def _left(store: RecordStore, name: str, text: bytes) -> str:
    """Make a record a file again, or begin the line that says why it stays in its archive."""
    path = store.folder / name
    if file_case(name) is None or os.path.basename(name) != name:
        raise PackingError(f"{store.archives.holder(name)}: {name} is no record's file")
    try:
        data = archive.expanded(text)
    except (ValueError, RecursionError):
        return f"{name[:200]}: not a readable record in"
    try:
        atomic.create(path, data)
    except FileExistsError:
        return "" if path.read_bytes() == data else f"{path}: another record than in"
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return f"{name[:200]}...: too long a name for a file in"
    return ""
