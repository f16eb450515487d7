"""Candidates against their baseline, among cases equal in everything else."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta

import numpy as np
import pandas as pd

from harness.analysis.stats import (
    CONFIDENCE,
    FINE_RESAMPLES,
    FINEST_CONFIDENCE,
    median_ratios,
    verdict,
)
from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups
from harness.cases.task import WHOLE_PHASES, task_type
from parallel import STRATEGIES


@dataclass(kw_only=True, slots=True, frozen=True)
class Axis:
    """One choice that candidates differ in."""

    choice: str
    columns: tuple[str, ...]
    """All columns that the choice decides."""
    needs_baseline: bool
    """Whether a group without a finished baseline is left out, rather than given another one."""
    other_baseline: str | None = None
    """The baseline, if it is not the choice that declares itself one."""

    @property
    def baseline(self) -> str | None:
        return self.other_baseline or POINTS[self.choice].baseline

    @property
    def words(self) -> str:
        """``over naive attention``, for titles and sentences."""
        looks, name = POINTS[self.choice].all_looks(), self.baseline
        return f"over {looks[name].baseline if name in looks else name}"


AXES = {
    "attention": Axis(choice="attention", columns=("attention",), needs_baseline=False),
    "compile_scope": Axis(
        choice="compile_scope", columns=("compile_scope", "compile_mode"), needs_baseline=True
    ),
    "strategy": Axis(choice="strategy", columns=("strategy",), needs_baseline=False),
    "precision": Axis(choice="precision", columns=("precision",), needs_baseline=True),
}

APART = timedelta(minutes=10)
"""Between the starts of two measurements, or of a round of theirs, beyond which their ratio may be
that of two hosts."""


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the phases that their tasks declare comparable."""
    pairs = zip(frame["task"], frame["phase"], strict=True)
    whole = [phase in task_type(task).compared_phases for task, phase in pairs]
    return frame[whole].reset_index(drop=True)


def fullest_mode(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the mode that includes the others, where a point was measured in several."""
    if frame.empty:
        return frame
    pairs = zip(frame["task"], frame["mode"], strict=True)
    ranks = [
        modes.index(mode) if mode in (modes := task_type(task).modes) else 0 for task, mode in pairs
    ]
    rank = pd.Series(ranks, index=frame.index)
    fullest = rank.groupby(point_groups(frame, ["mode"])).transform("max")
    return frame[rank == fullest]


def compare_with_peers(frame: pd.DataFrame) -> pd.DataFrame:
    """Strategies against those that they name as their peers, where options of both are equal."""
    found = [frame.iloc[:0]]
    options = [dict(case["parallel"]) for case in frame["case"]]
    kinds = pd.Series([option["name"] for option in options], index=frame.index, dtype=object)
    for kind in sorted(set(kinds) & set(STRATEGIES.names())):
        own = STRATEGIES[kind].target
        if own.peer is None:
            continue
        names = {field.name for field in fields(own)} - {"name"}
        shared = sorted(names & {field.name for field in fields(STRATEGIES[own.peer].target)})
        alike = pd.Series(
            [repr([option.get(name) for name in shared]) for option in options], index=frame.index
        )
        for _, rows in frame[kinds.isin([kind, own.peer])].groupby(alike, sort=True):
            peers = rows[kinds[rows.index] == own.peer]["strategy"].unique()
            if len(peers) == 1 and len(rows["strategy"].unique()) > 1:
                axis = replace(AXES["strategy"], other_baseline=peers[0], needs_baseline=True)
                found.append(compare(rows, axis))
    return pd.concat(found, ignore_index=True)


def compare(frame: pd.DataFrame, axis: Axis) -> pd.DataFrame:
    """The candidates of every group, with baseline, ratio, its interval and the verdict.

    The ratio is the baseline's median over the candidate's, so more than 1 is faster. ``axis``
    is the choice that the two differ in.
    ``apart_mark`` is the symbol of a footnote where both were measured long after each other.
    Empty where nothing differs in the choice alone.
    """
    names = sorted(frame[axis.choice].unique(), key=POINTS[axis.choice].rank)
    names.sort(key=lambda name: name != axis.baseline)
    pair = pd.DataFrame({"point": point_groups(frame, axis.columns), "phase": frame["phase"]})
    rows = frame.assign(
        group=pair.groupby(["point", "phase"]).ngroup(),
        place=frame[axis.choice].map({name: index for index, name in enumerate(names)}),
    )
    usable = rows[rows["status"] == "ok"]
    if axis.needs_baseline:
        usable = usable[usable[axis.choice] == axis.baseline]
    first = usable.sort_values(["group", "place"], kind="stable").drop_duplicates("group")
    first = first.set_index("group")
    rows = rows[rows["group"].isin(first.index)]
    baseline = first.loc[rows["group"]]
    rows = rows.assign(
        baseline=baseline[axis.choice].to_numpy(),
        baseline_id=baseline["case_id"].to_numpy(),
        baseline_ms=baseline["median_ms"].to_numpy(),
        baseline_samples=baseline["samples_ms"].to_numpy(),
        apart_mark=_apart(rows["rounds_started_at"], baseline["rounds_started_at"]),
    )
    rows = rows[rows["case_id"] != rows["baseline_id"]]
    ratio, low, high = median_ratios(rows["baseline_samples"].tolist(), rows["samples_ms"].tolist())
    words = [
        None if mid != mid else verdict(mid, start, end)
        for mid, start, end in zip(ratio, low, high, strict=True)
    ]
    verdicts = pd.Series(words, index=rows.index, dtype=object)
    return rows.assign(
        axis=axis.choice, ratio=ratio, ratio_low=low, ratio_high=high, verdict=verdicts
    )


def _apart(started: pd.Series, baseline: pd.Series) -> list[str]:
    """The mark of each pair that was measured neither in turns nor soon after each other."""
    pairs = zip(started, baseline, strict=True)
    return [fmt.PILCROW if _any_apart(*pair) else "" for pair in pairs]


def _any_apart(one: list[str], other: list[str]) -> bool:
    """Whether rounds of the same number began long after each other.

    Cases that took turns began them together, however often they were stopped and resumed.
    """
    num_rounds = max(len(one), len(other))
    times, others = (
        [datetime.fromisoformat(text) for text in (*texts, *texts[-1:] * (num_rounds - len(texts)))]
        for texts in (one, other)
    )
    if not times or not others:
        return False
    return any(abs(x - y) > APART for x, y in zip(times, others, strict=True))


def fullest_phase(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case: of the phase that includes the others, or its only one."""
    places = {phase: place for place, phase in enumerate(WHOLE_PHASES)}
    place = frame["phase"].map(places).fillna(len(places))
    ordered = frame.assign(place=place).sort_values("place", kind="stable")
    return ordered.drop_duplicates("case_id").drop(columns="place").sort_index()


def paired(
    one: pd.DataFrame, other: pd.DataFrame, *, has_samples: bool, same_within: float
) -> pd.DataFrame:
    """The rows of ``other`` with those of ``one``, both indexed alike, beside them.

    Adds ``a_value``, ``a_status``, ``ratio`` (one over other), the ends of its interval at a
    ``confidence`` at which all hold together, and ``outcome``. Without samples, as for memory,
    there is no interval, and the words are LESS and MORE.
    """
    good = (one["status"] == "ok") & (other["status"] == "ok")
    num_tests = max(1, int(good.sum()))
    confidence = max(CONFIDENCE, min(1 - (1 - CONFIDENCE) / num_tests, FINEST_CONFIDENCE))
    if has_samples:
        ratio, low, high = median_ratios(
            one["samples_ms"].tolist(),
            other["samples_ms"].tolist(),
            confidence=confidence,
            resamples=FINE_RESAMPLES,
        )
    else:
        ratio = (one["value"] / other["value"]).to_numpy(dtype=float)
        low = high = np.full(len(ratio), np.nan)
    words: list[str | None] = []
    for a_status, b_status, mid, start, end in zip(
        one["status"], other["status"], ratio, low, high, strict=True
    ):
        if mid == mid:
            ends = (start, end) if has_samples else (mid, mid)
            word = verdict(mid, *ends, same_within)
            words.append(word if has_samples else _MEMORY_WORDS[word])
        else:
            lost, gained = a_status == "ok" != b_status, b_status == "ok" != a_status
            words.append("lost" if lost else "gained" if gained else None)
    return other.assign(
        a_value=one["value"],
        a_status=one["status"],
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        confidence=confidence,
        outcome=pd.Series(words, index=other.index, dtype=object),
    )


_MEMORY_WORDS = {"FASTER": "LESS", "SLOWER": "MORE", "SAME": "SAME"}
