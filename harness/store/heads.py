"""The heads of records: how each case ended, decoded without its samples."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from harness.store.record import RecordError, RecordStore, file_case, require_status


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordHead:
    """How the newest attempt at a case ended."""

    status: str
    wall_s: float
    written_s: float
    """Time of writing, by the file system's clock; of an archived record the end of measuring."""
    message: str = ""
    """First line of the error, where it says more than the status."""


class _Fields(msgspec.Struct, kw_only=True):
    """The fields of a record that make its head; the decoder skips all others."""

    status: str
    error: dict[str, Any] | None
    wall_s: float
    started_at: str
    schema: int

    def __post_init__(self) -> None:
        require_status(self.status)


def read_heads(store: RecordStore) -> tuple[dict[str, RecordHead], list[str]]:
    """The newest readable record of every case by its id, and one line per unreadable file."""
    attempts: dict[str, list[tuple[int, str, bytes | None]]] = {}
    for name, archived in store.names().items():
        found = file_case(name)
        if found is not None:
            attempts.setdefault(found[0], []).append((found[1], name, archived))
    heads: dict[str, RecordHead] = {}
    problems = store.archives.problems()
    for case_id, files in attempts.items():
        for _, name, archived in sorted(files, reverse=True, key=lambda item: item[0]):
            try:
                read, written_s = store.read_as(name, _Fields, archived)
            except RecordError as error:
                problems.append(str(error))
                continue
            error_says = (read.error or {}).get("message") if read.status != "oom" else None
            heads[case_id] = RecordHead(
                status=read.status,
                wall_s=read.wall_s,
                written_s=_ended_s(read) if written_s is None else written_s,
                message=str(error_says or "").partition("\n")[0],
            )
            break
    return heads, problems


def _ended_s(read: _Fields) -> float:
    """When the measuring ended, by its host's clock; 0 where a record does not say."""
    try:
        return datetime.fromisoformat(read.started_at).timestamp() + read.wall_s
    except ValueError:
        return 0.0
