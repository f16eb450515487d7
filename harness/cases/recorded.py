"""Whether a record is of the case that its name says: a hash of the case is in its id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.cases.case import Case
from harness.store.attempts import Records
from harness.store.record import RecordStore


def load_for(store: RecordStore, cases: Iterable[Case]) -> tuple[Records, list[str]]:
    """The records of a folder, without those named as one of the cases that hold another one.

    Such a case is measured as if the file were not there: the store reads it no more. A record
    whose case cannot be built here, as that of another version or of a plugin, stands under its
    name.

    Returns:
        As :meth:`harness.store.record.RecordStore.load`.
    """
    attempts, problems = store.load_attempts()
    wanted = {case.id: case for case in cases}
    for case_id, number in [key for key in attempts if key[0] in wanted]:
        record = attempts[case_id, number]
        derived = case_id
        if record.case != wanted[case_id].to_dict():
            derived = _id_of(record.case) or case_id
        if derived != case_id:
            problems.append(store.set_aside(record, f"its case is that of {derived}"))
            del attempts[case_id, number]
    return Records(attempts), problems


def _id_of(values: Mapping[str, Any]) -> str | None:
    try:
        return Case.from_dict(dict(values)).id
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
