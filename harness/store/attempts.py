"""The attempts at the cases of a results folder: which counts, and what others must be told of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.statuses import that_counts

if TYPE_CHECKING:
    from harness.store.record import Record


class Records(dict[str, "Record"]):
    """The record that counts of each case by its id; see :func:`harness.statuses.that_counts`."""

    def __init__(self, attempts: Mapping[tuple[str, int], Record] | None = None) -> None:
        """Choose among readable attempts, by case id and number."""
        by_case: dict[str, list[Record]] = {}
        for case_id, number in sorted(attempts or ()):
            by_case.setdefault(case_id, []).append((attempts or {})[case_id, number])
        super().__init__()
        self.later: dict[str, Record] = {}
        """The newest attempt of cases in which an earlier one counts."""
        self.withdrawn: dict[str, Record] = {}
        """The newest attempt that had times, of cases whose answer a later one found wrong."""
        for case_id, records in by_case.items():
            place = that_counts([record.status for record in records])
            self[case_id] = counts = records[place]
            if counts is not records[-1]:
                self.later[case_id] = records[-1]
            if counts.status == "wrong":
                for record in records[:place]:
                    if record.status == "ok":
                        self.withdrawn[case_id] = record

    def newest(self, case_id: str) -> Record | None:
        """The newest readable attempt at a case, whether it counts or not."""
        return self.later.get(case_id) or self.get(case_id)
