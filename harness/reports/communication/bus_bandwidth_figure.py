"""Bus bandwidth of collective operations over size: where latency ends and the links begin."""

from __future__ import annotations

from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from harness.cases.columns import sort_by_points
from harness.drawing.line_labels import draw_spread, label_line_ends
from harness.drawing.marked import BAR_WORDS, draw_hollow, say_marked
from harness.drawing.panels import log_ticks, panels
from harness.render.figure import CaptionedFigure, figure
from harness.reports.communication.collective_rows import UNUSED, collectives, say_bandwidths
from harness.sentences.findings import sentence
from parallel.collectives import COLLECTIVES

CAPTION = (
    "Bus bandwidth over size, both axes logarithmic, by the formulas of nccl-tests: it compares "
    "with the speed of the links, whatever the operation and the number of ranks; "
    f"bars are of times {BAR_WORDS}."
)

WIDTH_IN, HEIGHT_IN = 6.4, 3.2

TINTS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#555555")
MARKERS = "osD^vP"


@figure("bus_bandwidth")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = collectives(frame)
    if rows.empty or rows["bus_gb_s"].notna().sum() == 0:
        return None
    # One operation is one panel, with a line for each number of ranks.
    series = "collective" if rows["collective"].nunique() > 1 else "world_size"
    across = ["collective", "size_mib", series]
    drawing, drawn, common = panels(
        sort_by_points(rows, across),
        [*across, *UNUSED],
        width_in=WIDTH_IN,
        height_in=HEIGHT_IN,
        share_y=True,
    )
    for axis, group in drawn:
        _draw(axis, group, series)
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(rows['mark'])} {common}".strip(),
        figure=drawing,
        finding=sentence(say_bandwidths(rows)),
    )


def _draw(axis: Axes, rows: pd.DataFrame, series: str) -> None:
    """One line for each operation, or for each number of ranks."""
    lines: list[Line2D] = []
    values = list(COLLECTIVES) if series == "collective" else sorted(rows[series].unique())
    for value, tint, shape in zip(values, cycle(TINTS), cycle(MARKERS), strict=False):
        mine = rows[(rows[series] == value) & rows["bus_gb_s"].notna()]
        if len(mine):
            name = (
                value if series == "collective" else f"{mine['collective'].iloc[0]}, {value} ranks"
            )
            x, y = mine["size_mib"], mine["bus_gb_s"]
            time = mine["collective_median_ms"]
            low, high = (y * time / mine[f"collective_{end}_ms"] for end in ("high", "low"))
            draw_spread(axis, x, low, high, tint)
            lines += axis.plot(x, y, color=tint, marker=shape, label=name)
            draw_hollow(axis, x, y, mine["mark"], tint, shape)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(FixedLocator(sorted(rows["size_mib"].unique())))
    axis.xaxis.set_minor_locator(NullLocator())
    log_ticks(axis)
    axis.set_xlabel("size (MiB)")
    if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axis.set_ylabel("bus bandwidth (GB/s)")
    label_line_ends(axis, lines, HEIGHT_IN - 0.9)
