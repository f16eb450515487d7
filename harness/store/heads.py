"""The heads of records: how each case ended, decoded without its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from harness.statuses import that_counts
from harness.store.record import RecordError, RecordStore, file_case, require_status, unreadable


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordHead:
    """How the newest attempt at a case ended."""

    status: str
    wall_s: float
    written_s: float
    """Time of writing, by the file system's clock; of an archived record the end of measuring."""
    message: str = ""
    """First line of the error, where it says more than the status."""
    counts: int | None = None
    """The earlier attempt that counts instead of the newest, if one does."""


class _Fields(msgspec.Struct, kw_only=True):
    """The fields of a record that make its head; the decoder skips all others."""

    case_id: str
    case: dict[str, Any]
    status: str
    error: dict[str, Any] | None
    wall_s: float
    started_at: str
    schema: int

    def __post_init__(self) -> None:
        require_status(self.status)


def read_heads(
    store: RecordStore, why_not: Callable[[str, dict[str, Any]], str] = lambda case_id, case: ""
) -> tuple[dict[str, RecordHead], list[str]]:
    """The newest readable attempt at every case by its id, and one line per unreadable file.

    Args:
        why_not: says of a record's case id and case why it is not read; empty if it is.
    """
    attempts: dict[str, list[tuple[int, str, bytes | None]]] = {}
    for name, archived in store.names().items():
        found = file_case(name)
        if found is not None:
            attempts.setdefault(found[0], []).append((found[1], name, archived))
    heads: dict[str, RecordHead] = {}
    problems = store.problems()
    for case_id, files in attempts.items():
        newest: list[tuple[int, _Fields, float | None]] = []
        for number, name, archived in sorted(files, reverse=True, key=lambda item: item[0]):
            try:
                fields, written_s = store.read_as(name, _Fields, archived)
            except RecordError as error:
                problems.append(str(error))
                continue
            if reason := why_not(fields.case_id, fields.case):
                problems.append(unreadable(store.folder / name, reason))
                continue
            newest.insert(0, (number, fields, written_s))
            if that_counts(["ok", newest[0][1].status]):
                # No earlier attempt counts instead.
                break
        if newest:
            heads[case_id] = _head(newest)
    return heads, problems


def _head(attempts: Sequence[tuple[int, _Fields, float | None]]) -> RecordHead:
    """The head of a case, from its newest attempts in order, each with its number."""
    newest, read, written_s = attempts[-1]
    counts = attempts[that_counts([fields.status for _, fields, _ in attempts])][0]
    error_says = (read.error or {}).get("message") if read.status != "oom" else None
    return RecordHead(
        status=read.status,
        wall_s=read.wall_s,
        written_s=_ended_s(read) if written_s is None else written_s,
        message=str(error_says or "").partition("\n")[0],
        counts=None if counts == newest else counts,
    )


def _ended_s(read: _Fields) -> float:
    """When the measuring ended, by its host's clock; 0 where a record does not say."""
    try:
        return datetime.fromisoformat(read.started_at).timestamp() + read.wall_s
    except (ValueError, OverflowError):
        return 0.0
