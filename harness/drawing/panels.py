"""A grid of panels, one per measured point, and what their axes have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from harness.cases.columns import sort_by_points
from harness.render.figure import describe, panel_key
from harness.render.rows import of_task

STEPS = ["warmup_steps", "measure_steps"]
MAX_PANELS = 8
MAX_COLUMNS = 2

COLUMNS_FIRST = ("precision", "mode", "cuda_graph", "compile_scope", "batch_size")
"""Points that make columns rather than rows of a grid of panels, the first that varies."""


def whole_calls(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of attention alone that hold all its passes: both, or forward where that is all.

    Without CUDA graphs that repeat some of the launched calls: they are for tables, and would be
    panels of a few points each.
    """
    calls = of_task(frame, "attention")
    graphed = calls["cuda_graph"].astype(bool)
    if graphed.sum() < len(calls) / 2:
        calls = calls[~graphed]
    both = calls["phase"] == "forward_backward"
    has_both = both.groupby(calls["case_id"]).transform("any")
    return calls[both | (~has_both & (calls["phase"] == "forward"))]


def panels(
    rows: pd.DataFrame,
    across: Iterable[str],
    *,
    width_in: float,
    height_in: float,
    share_y: bool | Literal["col"] = False,
    max_columns: int = MAX_COLUMNS,
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]], str]:
    """A figure with a titled panel for each point that differs beyond ``across``.

    Numbers of steps that follow from the point, such as fewer for long sequences, make no panels.

    Returns:
        The figure, each panel with its rows, and the sentence on what all panels share.
    """
    across = [name for name in across if name in rows]
    varying, common = panel_key(rows, across)
    without_steps, _ = panel_key(rows, [*across, *STEPS])
    if not rows.duplicated([*across, *without_steps]).any():
        varying = without_steps
    rows = sort_by_points(rows, [*varying, "attention"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    if len(groups) > MAX_PANELS:
        common = f"The first {MAX_PANELS} of {len(groups)} points. {common}"
        groups = groups[:MAX_PANELS]
    places, num_rows, num_columns = grid_places(
        [group.iloc[0] for _, group in groups], varying, max_columns
    )
    figure = Figure(
        figsize=(max(5.8, width_in * num_columns), height_in * num_rows + 0.2),
        layout="constrained",
    )
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharey=share_y)
    hide_unused(grid.ravel(), [grid[place] for place in places])
    drawn = []
    for place, (_, group) in zip(places, groups, strict=True):
        grid[place].set_title(describe(group.iloc[0], varying), pad=14)
        drawn.append((grid[place], group))
    return figure, drawn, common


def grid_places(
    firsts: Sequence[pd.Series], varying: Sequence[str], max_columns: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Row and column of each panel, and how many rows and columns that takes.

    Where one point (of :data:`COLUMNS_FIRST`, else any) has a value for each column, its values
    are the columns and everything else, such as the model, the rows; else panels are laid out
    line by line.

    Args:
        firsts: one row of the frame for each panel, in order.
    """
    keys = [tuple(str(row[name]) for name in varying) for row in firsts]
    names = [name for name in COLUMNS_FIRST if name in varying]
    names += [name for name in varying if name not in names]
    for name in names if len(varying) > 1 else ():
        at = list(varying).index(name)
        columns = list(dict.fromkeys(key[at] for key in keys))
        rests = [(*key[:at], *key[at + 1 :]) for key in keys]
        rows = list(dict.fromkeys(rests))
        if 2 <= len(columns) <= max_columns and len(rows) * len(columns) == len(keys):
            places = [
                (rows.index(rest), columns.index(key[at]))
                for key, rest in zip(keys, rests, strict=True)
            ]
            return places, len(rows), len(columns)
    num_columns = min(max_columns, len(keys))
    # As many in each line: six panels are three and three rather than five and one.
    num_rows = -(-len(keys) // num_columns)
    num_columns = -(-len(keys) // num_rows)
    return [divmod(index, num_columns) for index in range(len(keys))], num_rows, num_columns


def hide_unused(axes: Iterable[Axes], used: Sequence[Axes]) -> None:
    """Hide the places of a grid that no panel takes."""
    for axis in axes:
        axis.set_visible(axis in used)


def log_ticks(axis: Axes) -> None:
    """Plain numbers at the decades of both logarithmic axes, and between them if those are few."""
    log_ticks_of(axis.xaxis, axis.get_xlim())
    log_ticks_of(axis.yaxis, axis.get_ylim())


def log_ticks_of(ticks: Axis, limits: tuple[float, float]) -> None:
    """The same for one axis, which ends at these limits."""
    ticks.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
    low, high = limits
    # As many of each decade as do not overlap.
    labelled = "23456789" if high / low < 4 else "25" if high / low < 40 else ""
    ticks.set_minor_formatter(_minor_ticks(labelled) if labelled else NullFormatter())


def _minor_ticks(labelled: str) -> FuncFormatter:
    """Labels for the ticks that begin with one of these digits."""
    return FuncFormatter(lambda tick, _: f"{tick:,.10g}" if f"{tick:.0e}"[0] in labelled else "")
