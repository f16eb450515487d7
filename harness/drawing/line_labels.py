"""Labels at the ends of lines, spreads around points, and crosses where memory ran out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, DrawingArea
from matplotlib.transforms import offset_copy

from harness.cases import format as fmt
from harness.render.palette import colour

LEADER = "#BBBBBB"
"""The colour that leads from a point to its label; no data is drawn in it."""

MARGIN_PT, SAMPLE_PT = 12, 22
"""Distance from the axes to a sample of a line, and the sample's length."""


def label_line_ends(axes: Axes, lines: list[Line2D], height_in: float) -> None:
    """Write each line's label into the right margin, behind a sample of the line.

    Labels stand as high as their lines end, moved apart until none overlap. A pale line leads
    there from each line that runs as far as any other; one that ends early is known by its
    sample, since what crosses the plot where it has no data would look like data.

    Args:
        lines: drawn lines that have labels, on axes whose limits are final.
        height_in: height of the axes in inches, to know how tall a letter is.
    """
    bottom, top = (axes.transData.transform((1, y))[1] for y in axes.get_ylim())
    gap = (top - bottom) * 0.14 / height_in
    lines = sorted(lines, key=lambda line: (_end(line)[1], str(line.get_label())))
    last = max((_end(line)[0] for line in lines), default=0.0)
    heights = _spread([axes.transData.transform(_end(line))[1] for line in lines], gap)
    # Not so low that a label touches the number of the last tick.
    heights = _below(top, _above(bottom + gap / 2, heights, gap), gap)
    for line, height in zip(lines, heights, strict=True):
        beside = axes.transData.inverted().transform((0, height))[1]
        _write_label(axes, line, beside, led=_end(line)[0] == last)


def _end(line: Line2D) -> tuple[float, float]:
    x, y = np.asarray(line.get_data(), dtype=float)[:, -1]
    return float(x), float(y)


def _write_label(axes: Axes, line: Line2D, beside: float, *, led: bool) -> None:
    """A sample of the line and its label, in the margin at the height ``beside``."""
    margin = axes.get_yaxis_transform()
    sample = DrawingArea(SAMPLE_PT, 8)
    sample.add_artist(
        Line2D(
            [0, SAMPLE_PT / 2, SAMPLE_PT],
            [4, 4, 4],
            color=line.get_color(),
            linestyle=line.get_linestyle(),
            linewidth=line.get_linewidth(),
            marker=line.get_marker(),
            markevery=[1],
            markeredgecolor=line.get_markeredgecolor(),
            markeredgewidth=line.get_markeredgewidth(),
        )
    )
    leader = {"arrowstyle": "-", "color": LEADER, "linewidth": 0.7, "relpos": (0, 0.5)}
    axes.add_artist(
        AnnotationBbox(
            sample,
            _end(line),
            xybox=(1, beside),
            boxcoords=offset_copy(margin, axes.get_figure(root=True), x=MARGIN_PT, units="points"),
            box_alignment=(0, 0.5),
            frameon=False,
            pad=0,
            annotation_clip=False,
            arrowprops={**leader, "shrinkA": 1, "shrinkB": 3} if led else None,
            zorder=1,
        )
    )
    axes.annotate(
        str(line.get_label()),
        (1, beside),
        xycoords=margin,
        xytext=(MARGIN_PT + SAMPLE_PT + 4, 0),
        textcoords="offset points",
        color=line.get_color(),
        fontsize=8,
        va="center",
        annotation_clip=False,
    )


def draw_spread(
    axes: Axes, x: pd.Series, low: pd.Series, high: pd.Series, tint: str, *, upright: bool = True
) -> None:
    """A thin bar from ``low`` to ``high`` at each ``x`` (or at each y, lying)."""
    known = low.notna() & high.notna()
    draw = axes.vlines if upright else axes.hlines
    draw(x[known], low[known], high[known], color=tint, linewidth=2.6, alpha=0.45)


def mark_out_of_memory(axes: Axes, crosses: Iterable[tuple[float, str]]) -> None:
    """A cross for each (x, name) in the name's colour, side by side just above the frame.

    A name that has no line to be written at is written beside its cross.
    """
    drawn = {line.get_label() for line in axes.get_lines()}
    by_x: dict[float, list[str]] = {}
    for x, name in dict.fromkeys(crosses):
        by_x.setdefault(x, []).append(name)
    for x, names in by_x.items():
        for place, name in enumerate(names):
            known = any(str(label).startswith(name) for label in drawn)
            axes.annotate(
                fmt.TIMES if known else f"{fmt.TIMES} {name}",
                (x, 1.0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(7 * (place - (len(names) - 1) / 2), 4),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=11 if known else 7,
                fontweight="bold",
                color=colour(name),
            )


def _spread(heights: list[float], gap: float) -> list[float]:
    """Ascending heights moved apart to at least ``gap``, each cluster about its own middle."""
    clusters: list[list[float]] = []
    for height in heights:
        clusters.append([height])
        while len(clusters) > 1 and _overlap(clusters[-2], clusters[-1], gap):
            last = clusters.pop()
            clusters[-1] += last
    return [
        sum(cluster) / len(cluster) + (place - (len(cluster) - 1) / 2) * gap
        for cluster in clusters
        for place in range(len(cluster))
    ]


def _below(top: float, heights: list[float], gap: float) -> list[float]:
    """Heights moved down until none is above ``top``, at least ``gap`` apart."""
    found: list[float] = []
    for height in reversed(heights):
        top = min(top, height)
        found.append(top)
        top -= gap
    return found[::-1]


def _above(bottom: float, heights: list[float], gap: float) -> list[float]:
    """Heights moved up until none is below ``bottom``, at least ``gap`` apart."""
    return [-height for height in _below(-bottom, [-height for height in heights[::-1]], gap)][::-1]


def _overlap(below: list[float], above: list[float], gap: float) -> bool:
    distance = sum(above) / len(above) - sum(below) / len(below)
    return distance < gap * (len(below) + len(above)) / 2
