"""Rows of tables: cases with their phases beside each other, marks, and speed-ups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from harness.analysis.evidence import words_between
from harness.analysis.host_time import host_bound
from harness.analysis.likeness import differences_from
from harness.cases import format as fmt
from harness.cases.columns import point_groups
from harness.render.table import Column


def of_task(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The rows of some tasks alone."""
    return frame[frame["task"].isin(names)]


def cases_of(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """One mapping for each case, of its columns."""
    cases: list[dict[str, Any]] = rows.drop_duplicates("case_id").to_dict("records")  # type: ignore[assignment]
    return cases


def per_case(
    frame: pd.DataFrame, phases: Iterable[str] = (), values: Iterable[str] = ("median_ms",)
) -> pd.DataFrame:
    """One row per case, with its marks, and columns of its own for each phase.

    These are ``{phase}_{value}``, ``{phase}_iqr_ms``, ``{phase}_status``, ``{phase}_disturbed``,
    ``{phase}_impossible``, ``{phase}_host_bound``, ``{phase}_evidence`` and ``{phase}_mark``; empty
    for a phase that a case does not have. ``disturbed``, ``impossible``, ``host_bound`` and
    ``mark`` are of all these phases. What is known of a case that did not finish well (its memory
    so far) is emptied, since beside results it would read as one.
    """
    phases = list(phases)
    cases = frame.drop_duplicates("case_id").set_index("case_id")
    cases = cases.drop(columns=["phase", "clock", "samples_ms", "evidence"])
    shown = frame[frame["phase"].isin(phases)] if phases else frame
    for key in WORDS:
        together = shown.groupby("case_id", sort=False)[key].agg(_all_words)
        cases[key] = together.reindex(cases.index)
    waits = host_bound(shown).groupby(shown["case_id"]).any()
    cases["host_bound"] = waits.reindex(cases.index, fill_value=False)
    parts: dict[str, pd.Series] = {}
    for phase in phases:
        rows = frame[frame["phase"] == phase].set_index("case_id")
        own = ("iqr_ms", "status", *WORDS, "host_bound", "evidence")
        for value in dict.fromkeys((*values, *own)):
            parts[f"{phase}_{value}"] = rows[value].reindex(cases.index)
        parts[f"{phase}_mark"] = marks_of(rows).reindex(cases.index, fill_value="")
    cases = pd.concat([cases, pd.DataFrame(parts, index=cases.index)], axis=1)
    cases["mark"] = marks_of(cases)
    bad = cases["status"] != "ok"
    cases.loc[bad, [name for name in _RESULTS if name in cases]] = float("nan")
    return cases.reset_index()


_RESULTS = (
    *("peak_memory_gib", "peak_allocated_gib", "peak_reserved_gib", "peak_rss_gib"),
    *("before_backward_mib", "compile_s", "autotune_s", "first_pass_s"),
    *("recompilations", "loss"),
)


WORDS = ("disturbed", "impossible")
"""Columns of lists of words, for which a row is marked."""


def _all_words(lists: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(word for words in lists for word in words))


def marks_of(rows: pd.DataFrame, *, means: bool = False) -> pd.Series:
    """The symbols of the footnotes that each row deserves; some concern only its means."""
    disturbed, impossible, overtaken = (_has_words(rows[key]) for key in (*WORDS, "overtaken"))
    recompiled = rows["recompilations"].astype(float) > 0
    marks = disturbed.map({True: fmt.DAGGER, False: ""})
    marks += recompiled.map({True: fmt.DOUBLE_DAGGER, False: ""})
    marks += impossible.map({True: fmt.CIRCLED_SLASH, False: ""})
    marks += host_bound(rows).map({True: fmt.DOUBLE_BAR, False: ""})
    marks += rows["stale"].astype(bool).map({True: fmt.DIAMOND, False: ""})
    marks += overtaken.map({True: fmt.OPEN_TRIANGLE_DOWN, False: ""})
    if means:
        marks += rows["slow_start"].astype(bool).map({True: fmt.SECTION, False: ""})
    return marks


def _has_words(lists: pd.Series) -> pd.Series:
    return pd.Series([isinstance(words, list) and bool(words) for words in lists], lists.index)


def speedup_over(
    rows: pd.DataFrame, value: str, varied: Iterable[str], is_baseline: pd.Series
) -> pd.Series:
    """Baseline time over each row's time, among rows equal in everything but ``varied``."""
    group = point_groups(rows, varied)
    baselines = rows.loc[is_baseline].groupby(group[is_baseline])[value].first()
    return group.map(baselines) / rows[value]


def verdict_over(
    rows: pd.DataFrame, evidence: str, varied: Iterable[str], is_baseline: pd.Series
) -> pd.Series:
    """The verdict on each row against the baseline of :func:`speedup_over`; None without one."""
    group = point_groups(rows, varied)
    baselines = rows.loc[is_baseline].groupby(group[is_baseline])[evidence].first()
    words = words_between(group.map(baselines).tolist(), rows[evidence].tolist())
    return pd.Series(words, index=rows.index, dtype=object)


def unlike(
    rows: pd.DataFrame, group: pd.Series, baselines: pd.DataFrame
) -> tuple[pd.Series, pd.Series]:
    """How each row was measured unlike the first of the baselines in its group, and the marks.

    Args:
        group: of each row, as in :func:`speedup_over`.
        baselines: some of the rows.
    """
    places = dict(zip(rows.index, range(len(rows)), strict=True))
    firsts: dict[Any, int] = {}
    for label in baselines.index:
        firsts.setdefault(group[label], places[label])
    own = [firsts.get(key) for key in group]
    others = [None if place == index else place for index, place in enumerate(own)]
    words = differences_from(rows, others)
    marks = [fmt.STAR if found else "" for found in words]
    return pd.Series(words, rows.index, dtype=object), pd.Series(marks, rows.index, dtype=object)


def speedup_column(rows: pd.DataFrame, is_baseline: pd.Series) -> Column:
    """A column of ``speedup``, or of UNCLEAR where ``verdict`` says so; adds its cells."""
    unclear = (rows["verdict"] == "UNCLEAR") & ~is_baseline & rows["speedup"].notna()
    rows["speedup_cell"] = rows["speedup"].astype(object).mask(unclear, "UNCLEAR")
    raw = ("speedup", "verdict")
    return Column(key="speedup_cell", header="speed-up", format=_factor_or_word, raw=raw)


def _factor_or_word(value: float | str) -> str:
    return value if isinstance(value, str) else fmt.factor(value)


def apart_from_unsupported(cases: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Rows without backends that support none of the points, and a footnote that names these.

    Where a backend runs some of the points, its others keep their place and say unsupported.
    """
    unsupported = cases["status"] == "unsupported"
    never = unsupported.groupby(cases["attention"]).transform("all")
    if never.all():
        return cases, []
    reasons: dict[str, list[str]] = {}
    for _, row in cases[never].drop_duplicates("attention").iterrows():
        reasons.setdefault(row["reason"] or "no reason given", []).append(row["attention"])
    words = [f"{', '.join(sorted(names))} ({reason})" for reason, names in reasons.items()]
    notes = [f"Not supported here: {'; '.join(sorted(words))}."] if words else []
    return cases[~never].reset_index(drop=True), notes
