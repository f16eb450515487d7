"""Groups of cases that are compared with each other, and so measured in alternating rounds."""

from __future__ import annotations

import json
from collections.abc import Iterable

from harness.cases.case import Case


def comparison_groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Group cases that differ only in attention or strategy, in the order of each group's first.

    All cases of a group have the same number of ranks, so one worker group can run them. With
    one data-parallel rank strategies do nothing, so those cases are not compared by strategy.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        values = case.to_dict() | {"world_size": case.world_size}
        del values["attention"]
        if case.parallel.dp > 1:
            del values["parallel"]
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(case)
    return list(groups.values())
