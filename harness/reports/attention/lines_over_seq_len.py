"""Lines over sequence length, one per backend, named at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.cases.columns import POINTS, sorted_values
from harness.drawing.line_labels import draw_spread, label_line_ends
from harness.drawing.marked import draw_hollow
from harness.drawing.panels import log_ticks_of
from harness.render.palette import MARKERS, colour, marker

MAX_ROWS = 4
MAX_SERIES = 6


SHADES = "viridis"
"""Colours of a series that is no choice, such as head_dim, from its least value to its largest."""


def series_of(rows: pd.DataFrame, varying: Sequence[str]) -> str | None:
    """The point to draw lines for where one backend alone was measured, at values of one point."""
    if rows["attention"].nunique() > 1 or len(varying) != 1:
        return None
    return varying[0] if 2 <= rows[varying[0]].nunique() <= MAX_SERIES else None


def look_of(rows: pd.DataFrame, series: str, value: Any) -> tuple[str, str, str]:
    """Name, colour and marker of a line."""
    if series == "attention":
        return str(value), colour(str(value)), marker(str(value))
    values = sorted_values(rows, series)
    place = values.index(value)
    tint = mpl.colormaps[SHADES](0.85 * place / max(1, len(values) - 1))
    return POINTS[series].describe(value), to_hex(tint), MARKERS[place % len(MARKERS)]


def shared_limits(rows: pd.DataFrame, values: Sequence[str]) -> tuple[float, float] | None:
    """Limits of a logarithmic axis that hold these columns, with room for crosses; None if empty.

    Labels need them before they are placed, and panels that share an axis only have theirs at last.
    """
    known = rows[list(values)].to_numpy(dtype=float)
    known = known[known > 0]
    if not len(known):
        return None
    room = 3.0 if (rows["status"] == "oom").any() else 1.5
    return float(known.min()) / 1.5, float(known.max()) * room


def draw_lines(
    axis: Axes,
    rows: pd.DataFrame,
    value: str,
    *,
    height_in: float,
    predicted: str | None = None,
    spread: tuple[str, str] | None = None,
    marks: str | None = None,
    series: str = "attention",
    limits: tuple[float, float] | None = None,
) -> None:
    """``value`` over seq_len on log-log axes; a cross at the top where memory ran out.

    ``spread`` names the ends of a bar through each point, ``predicted`` a dashed line,
    ``marks`` the marks of tables, ``series`` the point that has a line for each value.
    ``limits`` of the y axis are those of :func:`shared_limits`, where panels share it.
    """
    lines: list[Line2D] = []
    crosses: list[tuple[float, str]] = []
    for one in sorted_values(rows, series):
        mine = rows[rows[series] == one].sort_values("seq_len", kind="stable")
        name, tint, shape = look_of(rows, series, one)
        shown = mine[mine[value].notna()]
        if predicted is not None:
            line = mine[mine[predicted].notna()]
            axis.plot(line["seq_len"], line[predicted], color=tint, linestyle="--", linewidth=1)
        if len(shown):
            if spread is not None:
                draw_spread(axis, shown["seq_len"], shown[spread[0]], shown[spread[1]], tint)
            lines += axis.plot(shown["seq_len"], shown[value], color=tint, marker=shape, label=name)
            if marks is not None:
                x, y = shown["seq_len"], shown[value]
                draw_hollow(axis, x, y, shown[marks], tint, shape)
        crosses += [(seq_len, tint) for seq_len in mine.loc[mine["status"] == "oom", "seq_len"]]
    axis.set_xscale("log", base=2)
    # A host's memory need not have grown at all, and zeros have no logarithm.
    axis.set_yscale("log" if (rows[value] > 0).any() else "linear")
    lengths = sorted(rows["seq_len"].unique())
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: fmt.integer(length)))
    axis.tick_params(axis="x", labelrotation=30 if len(lengths) > 5 else 0)
    low, high = axis.get_ylim()
    axis.set_ylim(limits or (low, high * 1.6 if crosses else high))
    if axis.get_yscale() == "log":
        log_ticks_of(axis.yaxis, axis.get_ylim())
    _draw_crosses(axis, crosses)
    label_line_ends(axis, lines, height_in)


def _draw_crosses(axis: Axes, crosses: list[tuple[float, str]]) -> None:
    """Crosses at the top edge, those of one length below one another."""
    transform = axis.get_xaxis_transform()
    seen: dict[float, int] = {}
    for seq_len, tint in crosses:
        depth = seen.get(seq_len, 0)
        seen[seq_len] = depth + 1
        y = 0.97 - 0.06 * depth
        axis.plot(
            seq_len, y, marker="x", color=tint, transform=transform, markersize=6, clip_on=False
        )
    for seq_len in seen:
        axis.annotate(
            "OOM",
            (seq_len, 0.97),
            xycoords=transform,
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color="#444444",
        )
