"""Verdicts on rows of a frame: which rounds belong together, and which of the levels applies.

Rows that were measured in turns are compared round by round. Otherwise their times are those of two
runs, and the level of the machine, calibrated or assumed, widens the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.host_time import is_true
from harness.analysis.intervals import FEWEST_ROUNDS
from harness.analysis.run_to_run import (
    Kind,
    Repeated,
    assumed_level,
    is_short,
    level_of,
    run_to_run_levels,
)
from harness.analysis.verdicts import (
    BY_FASTEST_PASS,
    EQUIVALENCE,
    MORE,
    Level,
    decide,
    interval_words,
    looks_at,
    rule,
)

APART = timedelta(minutes=10)
"""Between the starts of two measurements, or of a round of theirs, beyond which their ratio may be
that of two hosts."""

COLUMNS = (
    *("ratio", "ratio_low", "ratio_high", "verdict", "why", "band"),
    *("in_turns", "num_rounds", "level"),
)


def row_verdicts(
    baseline: pd.DataFrame, candidate: pd.DataFrame, *, band: float = EQUIVALENCE
) -> pd.DataFrame:
    """The :data:`COLUMNS` for each pair of rows of equal place, indexed like ``candidate``.

    ``verdict`` is None, and the ratio NaN, where either side has no samples.
    """
    wanted = [
        *("machine", "rounds_ms", "round_processes", "rounds_started_at"),
        *("until_decided", "run_level", "assumed_level", "device", "disturbed"),
    ]
    sides = (rows[wanted].to_dict("records") for rows in (baseline, candidate))
    found = [_pair(one, other, band) for one, other in zip(*sides, strict=True)]
    # Words as objects, since a column of strings would take None for a number.
    rows = pd.DataFrame(found, columns=list(COLUMNS), index=candidate.index, dtype=object)
    return rows.astype(_NUMBERS)


_NUMBERS = {
    **dict.fromkeys(("ratio", "ratio_low", "ratio_high", "band"), float),
    "num_rounds": int,
    "in_turns": bool,
}


def _pair(one: dict[str, Any], other: dict[str, Any], band: float) -> tuple[Any, ...]:
    two_hosts = one["machine"].is_other(other["machine"])
    turns = not two_hosts and in_turns(one["rounds_started_at"], other["rounds_started_at"])
    num_rounds = min(len(one["rounds_ms"]), len(other["rounds_ms"]))
    until_decided = bool(one["until_decided"] or other["until_decided"])
    level = _level(one, other, calibrated_only=turns, two_hosts=two_hosts)
    verdict = decide(
        one["rounds_ms"],
        other["rounds_ms"],
        band=band,
        looks=looks_at(num_rounds, until_decided=until_decided),
        paired=turns,
        baseline_processes=one["round_processes"],
        candidate_processes=other["round_processes"],
        level=level,
        busy=any(side["device"] == "cpu" and "busy" in side["disturbed"] for side in (one, other)),
    )
    word = verdict.word if verdict.ratio == verdict.ratio else None
    cells = (verdict.ratio, verdict.low, verdict.high, word, verdict.why, verdict.band)
    return (*cells, turns, num_rounds, None if turns else level)


def rule_words(rows: pd.DataFrame) -> str:
    """A caption's words on the interval and the rule of rows that have the :data:`COLUMNS`."""
    told = rows[rows["num_rounds"] >= FEWEST_ROUNDS]
    bands, rounds = (
        sorted(set(told["band"])),
        sorted({int(number) for number in rows["num_rounds"] if number}),
    )
    words = f"{interval_words()}; {rule(*(bands[:1] or [EQUIVALENCE]))}"
    if len(bands) > 1:
        words += f" (up to {100 * bands[-1]:.2g}% where the machine varies more)"
    if rounds:
        several = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
        words += f"; {several} round{'' if rounds == [1] else 's'}"
    levels = {level.words for level in told["level"] if isinstance(level, Level)}
    if levels:
        words += (
            "; pairs that took no turns are two runs, whose interval is wider by "
            + " or ".join(sorted(levels))
        )
    if number := int((rows["why"] == BY_FASTEST_PASS).sum()):
        words += f". {number} decided {BY_FASTEST_PASS}"
    if len(told) < len(rows):
        words += f". With fewer than {FEWEST_ROUNDS} rounds a pair is UNCLEAR: {MORE}"
    return words


def interval_cells(rows: pd.DataFrame, digits: int = 2) -> pd.Series:
    """``1.02 to 1.31`` for each row, None where there is no interval."""
    cells = [
        None if low != low else f"{low:.{digits}f} to {high:.{digits}f}"
        for low, high in zip(rows["ratio_low"], rows["ratio_high"], strict=True)
    ]
    return pd.Series(cells, index=rows.index, dtype=object)


def reasons(rows: pd.DataFrame) -> pd.Series:
    """Why a pair that has enough rounds for an interval is UNCLEAR, or was decided in another way
    than by medians; None for others."""
    has_reason = (rows["num_rounds"] >= FEWEST_ROUNDS) & (rows["why"] != "")
    return rows["why"].astype(object).where(has_reason, None)


def _level(
    one: dict[str, Any], other: dict[str, Any], *, calibrated_only: bool, two_hosts: bool
) -> Level | None:
    """The larger of both sides' levels, and of two hosts no less than the assumed one.

    A calibration knows how the runs of its own host differ, and not how two hosts do.
    """
    levels = [side["run_level"] for side in (one, other)]
    known: list[Level] = [level for level in levels if isinstance(level, Level)]
    if not calibrated_only and (two_hosts or len(known) < 2):
        known += [one["assumed_level"], other["assumed_level"]]
    return max(known, key=lambda level: level.std_log, default=None)


def in_turns(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two cases took turns: neither began a round after the other began its next.

    A case of one round took turns with one that began at the same moment, as those of a round do.
    """
    times, others = ([datetime.fromisoformat(text) for text in texts] for texts in (one, other))
    number = min(len(times), len(others))
    if not number or any_apart(one[:number], other[:number]):
        return False
    ends = [later for _, later in pairwise(times[:number])]
    other_ends = [later for _, later in pairwise(others[:number])]
    return all(start <= end for start, end in zip(times, other_ends, strict=False)) and all(
        start <= end for start, end in zip(others, ends, strict=False)
    )


def any_apart(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether rounds of the same number began long after each other.

    Cases that took turns began them together, however often they were stopped and resumed.
    """
    num_rounds = max(len(one), len(other))
    times, others = (
        [datetime.fromisoformat(text) for text in (*texts, *texts[-1:] * (num_rounds - len(texts)))]
        for texts in (list(one), list(other))
    )
    if not times or not others:
        return False
    return any(abs(x - y) > APART for x, y in zip(times, others, strict=True))


def add_run_levels(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with ``run_level``: the calibrated :class:`Level` for each row, or None.

    Calibrated are hosts and devices of which some cases were measured in several processes.
    ``assumed_level`` is that of a machine without calibration.
    """
    levels = run_to_run_levels(calibration_rows(frame)["repeated"])
    kinds = [
        (Kind(host, device, is_short(median), is_true(hindered)), hindered is not None)
        for host, device, median, hindered in zip(
            *(frame[name] for name in ("host", "device_name", "median_ms", "hindered")), strict=True
        )
    ]
    found = [level_of(levels, kind, told=told) for kind, told in kinds]
    assumed = [
        assumed_level(median, hindered, device)
        for median, hindered, device in zip(
            *(frame[name] for name in ("median_ms", "hindered", "device")), strict=True
        )
    ]
    return frame.assign(
        run_level=pd.Series(found, index=frame.index, dtype=object),
        assumed_level=pd.Series(assumed, index=frame.index, dtype=object),
    )


def calibration_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The cases that were measured in several processes, by their longest phase.

    Column ``repeated`` holds each as the estimate of the level takes it.
    """
    good = frame[frame["num_samples"] > 0]
    longest = good.sort_values("median_ms", kind="stable", ascending=False)
    longest = longest.drop_duplicates("case_id").sort_index()
    repeated = [
        Repeated(
            rounds_ms=rounds,
            processes=processes,
            host=host,
            device=device,
            hindered=is_true(hindered),
        )
        for rounds, processes, host, device, hindered in zip(
            longest["rounds_ms"],
            longest["round_processes"],
            longest["host"],
            longest["device_name"],
            longest["hindered"],
            strict=True,
        )
    ]
    rows = longest.assign(repeated=pd.Series(repeated, index=longest.index, dtype=object))
    return rows[np.array([case.calibrates for case in repeated], dtype=bool)]
