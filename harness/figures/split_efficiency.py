"""Efficiency of attention over several ranks, over the length of the sequence."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness import format as fmt
from harness.figure import CaptionedFigure, colour, figure, marker
from harness.figures._split_panels import LINE_STYLES, calls_by_panel

WIDTH_IN, HEIGHT_IN = 4.2, 3.0

CAPTION = (
    "Efficiency: time of the same kernel on one device with the whole sequence, divided by the "
    "ranks, over the time of attention split over them. 100% is a perfect split; the line styles "
    "are transports."
)


@figure("split_efficiency")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    panels, common = calls_by_panel(frame)
    panels = [(title, rows) for title, rows in panels if rows["efficiency"].notna().any()]
    if not panels:
        return None
    num_columns = min(2, len(panels))
    legend_columns = 3 if num_columns == 1 else 4
    num_rows = -(-len(panels) // num_columns)
    drawing = Figure(
        figsize=(max(6.4, WIDTH_IN * num_columns), HEIGHT_IN * num_rows + 0.9),
        layout="constrained",
    )
    axes = drawing.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    for axis in axes.ravel()[len(panels) :]:
        axis.set_visible(False)
    lines: dict[tuple[str, str], Line2D] = {}
    for axis, (title, rows) in zip(axes.ravel(), panels, strict=False):
        axis.set_title(title)
        lines |= _draw(axis, rows)
    for axis in axes[:, 0]:
        axis.set_ylabel("efficiency (%)")
    handles = list(lines.values())
    drawing.legend(handles=handles, loc="outside upper center", ncols=legend_columns)
    return CaptionedFigure(caption=f"{CAPTION} {common}".strip(), figure=drawing)


def _draw(axis: Axes, rows: pd.DataFrame) -> dict[tuple[str, str], Line2D]:
    """The lines of one panel, by scheme and transport."""
    drawn = {}
    for names, mine in rows.groupby(["scheme", "transport"], sort=False):
        scheme, transport = map(str, names)
        shown = mine[mine["efficiency"].notna()].sort_values("seq_len", kind="stable")
        if shown.empty:
            continue
        (line,) = axis.plot(
            shown["seq_len"],
            100 * shown["efficiency"],
            color=colour(scheme),
            marker=marker(scheme),
            linestyle=LINE_STYLES.get(transport, "-"),
            label=f"{scheme}, {transport}",
        )
        drawn[scheme, transport] = line
    axis.axhline(100, color="#444444", linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_xscale("log", base=2)
    lengths = sorted(rows["seq_len"].unique())
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: fmt.integer(length)))
    axis.set_xlabel("sequence length")
    return drawn
