"""A comparison in a terminal: the rows worth printing, and the line that sums all of them up."""

from __future__ import annotations

import math
from collections import Counter

import pandas as pd

from harness.cases import format as fmt

ROWS_IN_TERMINAL = 40

_LEAST_TELLING = ("SAME", "UNCLEAR", "gained")
"""Outcomes whose rows go first where a table is too long."""


def for_terminal(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows worth printing, in their order, and one line on those that are not.

    Cases that neither side has a result of never are; of what is left over, those whose ratios
    are farthest from 1.
    """
    shown = rows[rows["outcome"].notna() & (rows["outcome"] != "SAME")]
    for word in _LEAST_TELLING:
        if len(shown) > ROWS_IN_TERMINAL:
            shown = shown[shown["outcome"] != word]
    farthest = False
    if len(shown) > ROWS_IN_TERMINAL:
        # Those that lost their result have no ratio, and come first.
        distance = shown["ratio"].astype(float).map(math.log).abs().fillna(math.inf)
        kept = distance.sort_values(ascending=False, kind="stable").index[:ROWS_IN_TERMINAL]
        shown, farthest = shown.loc[sorted(kept)], True
    hidden = rows.drop(shown.index)["outcome"]
    counts = Counter(hidden.dropna())
    in_order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{number} {word}" for word, number in in_order]
    if not words:
        return shown, ""
    head = f"The {ROWS_IN_TERMINAL} rows farthest from 1; not" if farthest else "Not"
    return shown, f"{head} shown: {', '.join(words)}."


def summary(
    rows: pd.DataFrame,
    names: tuple[str, str],
    totals: tuple[int, int],
    bound: float | None,
    num_regressions: int,
) -> str:
    """One line: ``b against a: 96 cases: 2 FASTER (1.031 to 1.054 times), 94 SAME; ...``.

    Args:
        totals: the cases of each side, also those that the other side has not.
    """
    counts = rows["outcome"].value_counts()
    words = [_counted(rows, str(name), int(count)) for name, count in counts.items()]
    neither = int(rows["outcome"].isna().sum())
    if neither:
        words.append(f"{neither} without a result on either side")
    parts = [f"{fmt.counted(len(rows), 'case')}: {', '.join(words)}"]
    parts += [
        f"{total - len(rows)} only in {name}"
        for total, name in zip(totals, names, strict=True)
        if total > len(rows)
    ]
    if bound is not None:
        parts.append(f"{fmt.counted(num_regressions, 'regression')} beyond {bound:g}%")
    return f"{names[1]} against {names[0]}: {'; '.join(parts)}"


def _counted(rows: pd.DataFrame, outcome: str, count: int) -> str:
    """How many have an outcome, and the ratios of those that are told apart."""
    ratios = rows.loc[rows["outcome"] == outcome, "ratio"].dropna()
    if outcome in _LEAST_TELLING or ratios.empty:
        return f"{count} {outcome}"
    ends = list(dict.fromkeys(f"{end:.3f}" for end in (ratios.min(), ratios.max())))
    return f"{count} {outcome} ({' to '.join(ends)} times)"
