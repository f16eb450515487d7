"""Panels of attention over several ranks."""

from __future__ import annotations

import pandas as pd

from harness.cases.columns import sort_by_points
from harness.render.figure import describe, panel_key
from harness.reports.context.split_rows import split_calls

MAX_PANELS = 6

ACROSS = ("attention", "scheme", "transport", "strategy", "seq_len")
"""Points that one panel holds."""


def calls_by_panel(
    frame: pd.DataFrame, across: tuple[str, ...] = ACROSS
) -> tuple[list[tuple[str, pd.DataFrame]], str]:
    """(title, rows) of each panel, and the sentence on what all of them share."""
    rows = split_calls(frame)
    if rows.empty:
        return [], ""
    varying, common = panel_key(rows, across)
    rows = sort_by_points(rows, [*varying, "seq_len", "scheme", "transport"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    if len(groups) > MAX_PANELS:
        # The last ones have most ranks and the longest sequences.
        common = f"The last {MAX_PANELS} of {len(groups)} points. {common}"
        groups = groups[-MAX_PANELS:]
    return [(describe(group.iloc[0], varying), group) for _, group in groups], common
