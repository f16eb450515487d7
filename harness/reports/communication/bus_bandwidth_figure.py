"""Bus bandwidth of collective operations over size: where latency ends and the links begin."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from harness.cases.columns import sort_by_points
from harness.drawing.line_labels import draw_spread, label_line_ends
from harness.drawing.marked import BAR_WORDS, draw_hollow, say_marked
from harness.drawing.panels import log_ticks
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.reports.communication.collective_rows import UNUSED, collectives, say_bandwidths
from harness.sentences.findings import sentence
from parallel.collectives import COLLECTIVES

CAPTION = (
    "Bus bandwidth over size, both axes logarithmic, by the formulas of nccl-tests: it compares "
    "with the speed of the links, whatever the operation and the number of ranks; "
    f"bars are of times {BAR_WORDS}."
)

WIDTH_IN, HEIGHT_IN = 4.4, 3.2
NUM_COLUMNS = 2
MAX_PANELS = 8

TINTS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#555555")
MARKERS = "osD^vP"


@figure("bus_bandwidth")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = collectives(frame)
    if rows.empty or rows["bus_gb_s"].notna().sum() == 0:
        return None
    varying, common = panel_key(rows, ["collective", "size_mib", *UNUSED])
    rows = sort_by_points(rows, [*varying, "collective", "size_mib"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    if len(groups) > MAX_PANELS:
        common = f"The first {MAX_PANELS} of {len(groups)} points. {common}"
        groups = groups[:MAX_PANELS]
    num_columns = min(NUM_COLUMNS, len(groups))
    num_rows = -(-len(groups) // num_columns)
    drawing = Figure(
        figsize=(max(6.4, WIDTH_IN * num_columns), HEIGHT_IN * num_rows + 0.2),
        layout="constrained",
    )
    axes = drawing.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    for axis in axes.ravel()[len(groups) :]:
        axis.set_visible(False)
    for axis, (_, group) in zip(axes.ravel(), groups, strict=False):
        axis.set_title(describe(group.iloc[0], varying))
        _draw(axis, group)
    for axis in axes[:, 0]:
        axis.set_ylabel("bus bandwidth (GB/s)")
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(rows['mark'])} {common}".strip(),
        figure=drawing,
        finding=sentence(say_bandwidths(rows)),
    )


def _draw(axis: Axes, rows: pd.DataFrame) -> None:
    """One line for each operation."""
    lines: list[Line2D] = []
    for name, tint, shape in zip(COLLECTIVES, TINTS, MARKERS, strict=True):
        mine = rows[(rows["collective"] == name) & rows["bus_gb_s"].notna()]
        if len(mine):
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
    label_line_ends(axis, lines, HEIGHT_IN - 0.9)
