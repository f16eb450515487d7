"""Evidence of rows that have lost their rounds: enough to ask for the verdict of two of them.

A table's row holds medians alone. The frame's column ``evidence`` goes with them, one object for
each case and phase, so that a sentence about a table can ask what a comparison would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from harness.analysis.host_time import is_true
from harness.analysis.intervals import FEWEST_ROUNDS
from harness.analysis.row_verdicts import row_verdicts

_COLUMNS = (
    *("machine", "rounds_ms", "round_processes", "rounds_started_at"),
    *("until_decided", "run_level", "assumed_level", "host_bound", "device", "disturbed"),
)

Evidence = dict[str, Any]
"""The columns of a frame's row that its verdicts rest on, and whether it is host-bound."""


def add_evidence(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with ``evidence``: an :data:`Evidence` for each row with samples that can be.

    None for others: times that are ``impossible`` decide nothing.
    """
    rows = frame[list(_COLUMNS)].to_dict("records")
    found = [
        row if row["rounds_ms"] and not impossible else None
        for row, impossible in zip(rows, frame["impossible"], strict=True)
    ]
    return frame.assign(evidence=pd.Series(found, index=frame.index, dtype=object))


def words_between(baselines: Sequence[Any], candidates: Sequence[Any]) -> list[str | None]:
    """The verdict's word on each candidate against the baseline of equal place.

    None where either has no evidence: values that are not of type :data:`Evidence` count as none.
    """
    pairs = list(zip(baselines, candidates, strict=True))
    known = [place for place, pair in enumerate(pairs) if all(map(is_evidence, pair))]
    words: list[str | None] = [None] * len(pairs)
    if not known:
        return words
    sides = [pd.DataFrame([pairs[place][side] for place in known]) for side in (0, 1)]
    found = row_verdicts(sides[0], sides[1])["verdict"]
    for place, word in zip(known, found, strict=True):
        words[place] = word
    return words


def is_evidence(value: Any) -> bool:
    """Whether a cell of an evidence column holds any."""
    return isinstance(value, dict)


def is_host_bound(value: Any) -> bool:
    """Whether the evidence is known to be of the host's time."""
    return is_evidence(value) and is_true(value["host_bound"])


def most_rounds(values: Sequence[Any]) -> int:
    """The largest number of rounds among the evidence; 0 without any."""
    return max((len(value["rounds_ms"]) for value in values if is_evidence(value)), default=0)


def too_few_rounds(values: Sequence[Any]) -> int | None:
    """How many rounds there are, where they are too few for a verdict; None where they are not."""
    number = most_rounds(values)
    return number if number < FEWEST_ROUNDS else None
