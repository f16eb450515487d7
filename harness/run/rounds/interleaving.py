"""Groups of cases that are compared with each other, and the order of their turns in each round."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence

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


def turns(cases: Sequence[Case], round_index: int) -> list[Case]:
    """The order in which cases take their turns in one round.

    It is random, so that no case always follows the same other one, and a function of the cases
    and the round, so that a run which goes on after an interruption finds the same order.
    """
    seed = " ".join([*sorted(case.id for case in cases), str(round_index)])
    return random.Random(seed).sample(list(cases), len(cases))
