"""Lines of decoding steps over one size, by attention and cache, named at their ends."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups, sorted_values
from harness.drawing.line_labels import draw_spread, label_line_ends, mark_out_of_memory
from harness.drawing.marked import draw_hollow
from harness.render.palette import colour, marker

LINE_STYLES = ("-", "--", ":", "-.")
"""One for each cache, in the order of their names."""

SERIES = ("attention", "cache")


def with_several(rows: pd.DataFrame, x: str, across: Iterable[str]) -> pd.DataFrame:
    """The rows of points that have more than one ``x`` to draw a line over."""
    panel = point_groups(rows, [name for name in across if name in POINTS])
    return rows[rows.groupby(panel)[x].transform("nunique") > 1]


def draw_series(
    axis: Axes,
    rows: pd.DataFrame,
    x: str,
    value: str,
    *,
    height_in: float,
    low: str,
    high: str,
) -> None:
    """``value`` over ``x``, which is logarithmic, with a bar from ``low`` to ``high``."""
    sizes = sorted(rows[x].unique())
    caches = sorted(rows["cache"].unique())
    lines: list[Line2D] = []
    crosses: list[tuple[float, str]] = []
    for name in sorted_values(rows, "attention"):
        for cache in caches:
            chosen = (rows["attention"] == name) & (rows["cache"] == cache)
            mine = rows[chosen].sort_values(x, kind="stable")
            crosses += [(size, name) for size in mine.loc[mine["status"] == "oom", x]]
            shown = mine[mine[value].notna()]
            if shown.empty:
                continue
            tint, words = colour(name), name if len(caches) == 1 else f"{name}, {cache}"
            draw_spread(axis, shown[x], shown[low], shown[high], tint)
            lines += axis.plot(
                shown[x],
                shown[value],
                color=tint,
                marker=marker(name),
                linestyle=LINE_STYLES[caches.index(cache) % len(LINE_STYLES)],
                label=words,
            )
            draw_hollow(axis, shown[x], shown[value], shown["mark"], tint, marker(name))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(sizes))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: fmt.integer(size)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
    axis.tick_params(axis="x", labelrotation=30 if len(sizes) > 5 else 0)
    mark_out_of_memory(axis, crosses)
    label_line_ends(axis, lines, height_in)
