"""Whether a record is of the case that its name says: a hash of the case is in its id."""

from __future__ import annotations

from typing import Any

from harness.cases.case import Case, digest_of
from harness.store.attempts import Records
from harness.store.record import Record, RecordStore


def load(store: RecordStore) -> tuple[Records, list[str]]:
    """The record of every case that counts, without those that hold another case than they say.

    Such a case is measured as if the file were not there, and the store reads it no more. A record
    whose case cannot be built here, as that of another version or of a plugin, stands under its
    name.

    Returns:
        As :meth:`harness.store.record.RecordStore.load`.
    """
    attempts, problems = load_attempts(store)
    return Records(attempts), problems


def load_attempts(store: RecordStore) -> tuple[dict[tuple[str, int], Record], list[str]]:
    """As :func:`load`, but every attempt by case id and number."""
    attempts, problems = store.load_attempts()
    for key, record in list(attempts.items()):
        if reason := why_not(record.case_id, record.case):
            problems.append(store.set_aside(record, reason))
            del attempts[key]
    return attempts, problems


def why_not(case_id: str, case: dict[str, Any]) -> str:
    """Why a record is not read that holds another case than its id says; empty if it does not."""
    try:
        # Twenty times faster than building the case.
        if case_id.endswith(f"-{digest_of(case)}"):
            return ""
        derived = Case.from_dict(dict(case)).id
    except _NOT_BUILT:
        return ""
    return f"its case is that of {derived}" if derived != case_id else ""


_NOT_BUILT = (ValueError, TypeError, KeyError, AttributeError)
