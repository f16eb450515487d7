"""Groups of cases that are compared with each other, and so measured in alternating rounds."""

from __future__ import annotations

import json
from collections.abc import Iterable

from harness.cases.case import Case


def comparison_groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that differ in attention or strategy alone, together, in the order of the first.

    All cases of a group have as many ranks, and so one worker group. A strategy that trains on
    one rank does nothing, and has nothing to be compared with.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        values = case.to_dict() | {"world_size": case.world_size}
        del values["attention"]
        if case.parallel.dp > 1:
            del values["parallel"]
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(case)
    return list(groups.values())
