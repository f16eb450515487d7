"""Lines of decoding steps over one size, by attention and cache, named at their ends."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups, sort_by_points, sorted_values
from harness.drawing.bars import draw_bars
from harness.drawing.line_labels import draw_spread, label_line_ends, mark_out_of_memory
from harness.drawing.marked import draw_hollow
from harness.drawing.panels import MAX_COLUMNS, panels
from harness.render.palette import colour, marker

LINE_STYLES = ("-", "--", ":", "-.")
"""One for each cache, in the order of their names."""

SERIES = ("attention", "cache")


def with_several(rows: pd.DataFrame, x: str, across: Iterable[str]) -> pd.DataFrame:
    """The rows of points that have more than one ``x`` to draw a line over."""
    panel = point_groups(rows, [name for name in across if name in POINTS])
    return rows[rows.groupby(panel)[x].transform("nunique") > 1]


BARS_WIDTH_IN = 7.2

FEW = 2
"""Sizes that make bars rather than a line: between them nothing is known."""


def size_panels(
    rows: pd.DataFrame, across: Iterable[str], x: str, width_in: float, height_in: float
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]], str]:
    """Panels, below one another where some have bars, whose names take room at the left."""
    panel = point_groups(rows, [name for name in across if name in POINTS])
    mixed = (rows.groupby(panel)[x].nunique() <= FEW).any()
    return panels(
        rows,
        across,
        width_in=BARS_WIDTH_IN if mixed else width_in,
        height_in=height_in,
        max_columns=1 if mixed else MAX_COLUMNS,
    )


def draw_size_bars(
    axis: Axes, rows: pd.DataFrame, x: str, value: str, *, word: str, least: str = ""
) -> None:
    """A bar of ``value`` for each attention, cache and size, those of one size together.

    ``least`` names the column of the least possible value, a dotted line across each bar.
    """
    rows = rows[rows["status"] != "unsupported"]
    rows = sort_by_points(rows, [x, "attention", "cache"])
    several = rows["cache"].nunique() > 1
    names = [
        f"{row['attention']}{', ' + row['cache'] if several else ''}, {word} {fmt.integer(row[x])}"
        for _, row in rows.iterrows()
    ]
    draw_bars(
        axis,
        names,
        list(rows[value]),
        [colour(str(name)) for name in rows["attention"]],
        words=[fmt.STATUS_WORDS.get(status, fmt.ABSENT) for status in rows["status"]],
        marks=list(rows["mark"]),
    )
    for place, bound in enumerate(rows[least]) if least else ():
        axis.plot([bound] * 2, [place - 0.4, place + 0.4], color="#000000", linestyle=":")


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
    """``value`` over ``x``, which is logarithmic, with a bar from ``low`` to ``high``.

    A line that ends before others says where, since its label stands where it has no value.
    """
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
            words += f" (to {fmt.integer(last)})" if (last := shown[x].max()) < sizes[-1] else ""
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
