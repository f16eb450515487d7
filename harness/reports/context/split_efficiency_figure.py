"""Efficiency of attention over several ranks, over the length of the sequence."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.drawing.line_labels import draw_spread, label_line_ends, mark_out_of_memory
from harness.drawing.marked import BAR_WORDS
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour, marker
from harness.reports.context.split_panels import LINE_STYLES, calls_by_panel
from harness.sentences.findings import percent_span, say_unlike, sentence

WIDTH_IN, HEIGHT_IN = 4.8, 3.0

CAPTION = (
    "Efficiency: time of the same kernel on one device with the whole sequence, divided by the "
    "ranks, over the time of attention split over them. 100% is a perfect split; a bar is "
    f"of times {BAR_WORDS}, the line styles are transports; a hollow marker stands where the "
    "device and the ranks were measured at clocks over 2% apart, by two revisions or over ten "
    "minutes apart, and a cross above the frame where memory ran out."
)


@figure("split_efficiency")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    panels, common = calls_by_panel(frame)
    panels = [(title, rows) for title, rows in panels if rows["efficiency"].notna().any()]
    if not panels:
        return None
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    drawing = Figure(
        figsize=(max(6.4, WIDTH_IN * num_columns), HEIGHT_IN * num_rows + 0.2),
        layout="constrained",
    )
    axes = drawing.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    for axis in axes.ravel()[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, rows) in zip(axes.ravel(), panels, strict=False):
        axis.set_title(title)
        _draw(axis, rows)
    for axis in axes[:, 0]:
        axis.set_ylabel("efficiency (%)")
    known = pd.concat([rows for _, rows in panels]).dropna(subset=["efficiency"])
    alike = known.loc[known["unlike_mark"] == "", "efficiency"]
    claimed = None
    if len(alike):
        most = "over all schemes, ranks and lengths" if len(alike) == len(known) else "where clear"
        claimed = f"efficiency is {percent_span(alike)} {most}"
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(),
        figure=drawing,
        finding=sentence(claimed, say_unlike(known["unlike"], "efficiency", "the one device")),
    )


def _draw(axis: Axes, rows: pd.DataFrame) -> None:
    """The lines of one panel, by scheme and transport."""
    lines: list[Line2D] = []
    crosses: list[tuple[float, str]] = []
    for names, mine in rows.groupby(["scheme", "transport"], sort=False):
        scheme, transport = map(str, names)
        shown = mine[mine["efficiency"].notna()].sort_values("seq_len", kind="stable")
        crosses += [(length, scheme) for length in mine.loc[mine["status"] == "oom", "seq_len"]]
        if shown.empty:
            continue
        tint, percent = colour(scheme), 100 * shown["efficiency"]
        low, high = (
            percent * shown["whole_ms"] / shown[f"whole_{end}_ms"] for end in ("high", "low")
        )
        draw_spread(axis, shown["seq_len"], low, high, tint)
        lines += axis.plot(
            shown["seq_len"],
            percent,
            color=tint,
            marker=marker(scheme),
            linestyle=LINE_STYLES.get(transport, "-"),
            label=f"{scheme}, {transport}",
        )
        axis.plot(
            shown["seq_len"],
            percent.where(shown["unlike_mark"] != ""),
            color=tint,
            marker=marker(scheme),
            markerfacecolor="white",
            linestyle="none",
        )
    axis.axhline(100, color="#444444", linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_xscale("log", base=2)
    lengths = sorted(rows["seq_len"].unique())
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: fmt.integer(length)))
    axis.set_xlabel("sequence length (tokens)")
    mark_out_of_memory(axis, crosses)
    label_line_ends(axis, lines, HEIGHT_IN - 0.9)
