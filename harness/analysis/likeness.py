"""Whether two rows were measured alike, so that the ratio of their rates is that of their work.

An efficiency divides the rate of several ranks by that of one. Where the one ran at other clocks,
on another host or long before, the ratio is theirs too: it is marked, and no sentence rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from harness.analysis.row_verdicts import any_apart

CLOCKS_APART = 0.02
"""How far the SM clocks of two rows may differ, relative to the higher."""

MEANINGS: Mapping[str, str] = {
    "clocks": "the SM clocks of the slowest ranks differ by over 2%, or are not known",
    "host": "on two hosts",
    "revision": "by two revisions",
    "run": "over ten minutes apart",
}
"""Each difference, in the order of footnotes."""

PHRASES: Mapping[str, str] = {
    "clocks": "at other clocks",
    "host": "on another host",
    "revision": "by another revision",
    "run": "at another time",
}
"""Each difference in the words of a sentence: ``measured at other clocks than the other``."""

COLUMNS = ("device", "sm_clock_mhz", "machine", "revision", "rounds_started_at")
"""Columns of the frame that differences are read from."""


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In what two rows with :data:`COLUMNS` differ that their ratio would carry."""
    apart = {
        "clocks": not _have_equal_clocks(one, other),
        "host": one["machine"].is_other(other["machine"]),
        "revision": _are_two(one["revision"], other["revision"]),
        "run": any_apart(one["rounds_started_at"], other["rounds_started_at"]),
    }
    return [word for word in MEANINGS if apart[word]]


def differences_from(rows: pd.DataFrame, baselines: Sequence[int | None]) -> list[list[str]]:
    """The differences of each row from the row at its baseline's place; none without a baseline."""
    values: list[dict[str, Any]] = rows[list(COLUMNS)].to_dict("records")  # type: ignore[assignment]
    return [
        [] if place is None else differences(row, values[place])
        for row, place in zip(values, baselines, strict=True)
    ]


def _have_equal_clocks(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether clocks are equal as far as they matter; a CPU records none."""
    if one["device"] == other["device"] == "cpu":
        return True
    clock, baseline = one["sm_clock_mhz"], other["sm_clock_mhz"]
    # A comparison with NaN, of clocks that are not known, is false.
    return bool(abs(clock - baseline) <= CLOCKS_APART * max(clock, baseline))


def _are_two(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one != other
