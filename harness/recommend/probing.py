"""What fits, tried out: the predicted limits bisected on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.cases.case import Case
from harness.recommend.bisection import Edge, edge_near
from harness.recommend.limits import Limits, unit_of
from harness.recommend.longest import LONGEST


@dataclass(kw_only=True, slots=True, frozen=True)
class Tried:
    """Limits of one row that were tried; None where nothing is predicted to fit."""

    batch: Edge | None
    """Sequences in one step of all GPUs."""
    longest: Edge | None
    """Tokens of a sequence."""


def tried(row: Limits, fits: Callable[[Case], bool]) -> Tried:
    """Bisect one row of predicted limits with steps that run or run out of memory.

    Args:
        fits: runs a case; raises TimeoutError where no time is left for it.
    """
    batch = longest = None
    if (case := row.batch_case) is not None:
        batch = _edge(fits, _of_batch(case), case.batch_size, case.parallel.dp, MOST_SEQUENCES)
    if (case := row.longest_case) is not None:
        unit = unit_of(case)
        longest = _edge(fits, _of_length(case, unit), case.seq_len // unit, unit, LONGEST // unit)
    return Tried(batch=batch, longest=longest)


MOST_SEQUENCES = 2**20


def _edge(
    fits: Callable[[Case], bool], make: Callable[[int], Case], guess: int, unit: int, most: int
) -> Edge:
    """The edge in multiples of a unit."""
    found = edge_near(lambda number: fits(make(number)), guess, most)
    return replace(found, number=unit * found.number)


def _of_batch(case: Case) -> Callable[[int], Case]:
    return lambda number: replace(case, batch_size=number)


def _of_length(case: Case, unit: int) -> Callable[[int], Case]:
    return lambda number: replace(case, seq_len=number * unit)


def until(deadline_s: float, fits: Callable[[Case], bool]) -> Callable[[Case], bool]:
    """The same, which raises TimeoutError after a moment of :func:`time.monotonic`."""

    def tried_in_time(case: Case) -> bool:
        if time.monotonic() > deadline_s:
            raise TimeoutError
        return fits(case)

    return tried_in_time
