"""A grid of panels, one per measured point, and what their axes have in common."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from harness.figure import colour, describe, marker, panel_key
from harness.points import attention_rank, sort_by_points

MAX_PANELS = 8
MAX_COLUMNS = 2

LEGEND_ROW_IN = 0.2


def whole_calls(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of attention alone that hold all its passes: both, or forward where that is all."""
    calls = frame[frame["task"] == "attention"]
    both = calls["phase"] == "forward_backward"
    has_both = both.groupby(calls["case_id"]).transform("any")
    return calls[both | (~has_both & (calls["phase"] == "forward"))]


def panels(
    rows: pd.DataFrame,
    across: Iterable[str],
    *,
    width_in: float,
    height_in: float,
    legend: bool = False,
    share_y: bool = False,
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]], str]:
    """A figure with a titled panel for each point that differs beyond ``across``.

    ``legend`` names the backends above all panels.

    Returns:
        The figure, each panel with its rows, and the sentence on what all panels share.
    """
    varying, common = panel_key(rows, across)
    rows = sort_by_points(rows, [*varying, "attention"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    if len(groups) > MAX_PANELS:
        common = f"The first {MAX_PANELS} of {len(groups)} points. {common}"
        groups = groups[:MAX_PANELS]
    num_columns = min(MAX_COLUMNS, len(groups))
    num_rows = -(-len(groups) // num_columns)
    names = _names_with_values(pd.concat([group for _, group in groups])) if legend else []
    legend_columns = 3 + num_columns
    legend_in = 0.2 + LEGEND_ROW_IN * -(-len(names) // legend_columns)
    figure = Figure(
        figsize=(max(5.8, width_in * num_columns), height_in * num_rows + legend_in),
        layout="constrained",
    )
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharey=share_y).ravel()
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    drawn = []
    for axis, (_, group) in zip(axes, groups, strict=False):
        axis.set_title(describe(group.iloc[0], varying), pad=14)
        drawn.append((axis, group))
    if names:
        handles = [
            Line2D([], [], color=colour(name), marker=marker(name), label=name) for name in names
        ]
        ncols = min(len(names), legend_columns)
        figure.legend(handles=handles, loc="outside upper center", ncols=ncols)
    return figure, drawn, common


def _names_with_values(rows: pd.DataFrame) -> list[str]:
    """Backends that have a point to show: those that could not run have no place in a legend."""
    shown = rows["status"].isin(["ok", "oom"])
    return sorted(rows.loc[shown, "attention"].unique(), key=attention_rank)


def log_ticks(axis: Axes) -> None:
    """Plain numbers at the decades of both logarithmic axes, and between them if those are few."""
    for ticks, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        ticks.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
        few = high / low < 40
        ticks.set_minor_formatter(FuncFormatter(_minor_tick) if few else NullFormatter())


def _minor_tick(tick: float, _: int) -> str:
    """Labels for 2 and 5 of each decade; more would overlap."""
    return f"{tick:,.10g}" if f"{tick:.0e}"[0] in "25" else ""
