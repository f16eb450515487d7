"""Attention under the roofline: what the device allows at each arithmetic intensity.

The roofline model (Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009):
a kernel that does I FLOPs per byte of memory traffic runs at no more than the smaller of the
peak rate and I times the memory bandwidth.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.cases import format as fmt
from harness.cases.columns import point_groups, sort_by_points, sorted_values
from harness.drawing.bars import draw_bars
from harness.drawing.line_labels import label_line_ends, mark_out_of_memory
from harness.drawing.marked import FIRST_WORDS, SIGNS, first_by, say_marked
from harness.drawing.panels import log_ticks, panels, whole_calls
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour, marker
from harness.render.roof import draw_roof, with_measured_roof
from harness.render.rows import marks_of
from harness.sentences.findings import percent_span, sentence, span

CAPTION = (
    "Achieved rate of attention, forward and backward together unless the mode is forward, over "
    "its arithmetic intensity: FLOPs by the formula over the fewest bytes that any kernel must "
    "move, so that backends of one shape stand above one another; both axes logarithmic; "
    "a cross above the frame marks where memory ran out."
)

CAPTION_OF_BARS = (
    "Achieved rate of attention, forward and backward together unless the mode is forward, at the "
    "one arithmetic intensity of each shape; every panel has the same scale."
)

WIDTH_IN, HEIGHT_IN = 5.3, 3.3

HEADROOM = 2.5
"""Room above the roof, for the names of many backends just under it."""

SHAPES = ("attention", "seq_len", "kv_len", "batch_size", "num_heads", "num_kv_heads", "layout")
"""Columns that may differ inside a panel: they move a point along the roof."""


@figure("roofline")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = whole_calls(frame)
    if (rows["tflops"].isna() | rows["flops_per_byte"].isna()).all():
        return None
    rows, roof = with_measured_roof(frame, rows)
    if (rows.groupby(point_groups(rows, SHAPES))["flops_per_byte"].nunique() <= 1).all():
        return _as_bars(rows, roof)
    figure, drawn, common = panels(
        rows, SHAPES, width_in=WIDTH_IN, height_in=HEIGHT_IN, share_y=True
    )
    lines = [_draw(axis, group) for axis, group in drawn]
    top = np.nanmax(rows[["tflops", "peak_tflops"]])
    drawn[0][0].set_ylim(top=HEADROOM * top)
    for (axis, _), labelled in zip(drawn, lines, strict=True):
        log_ticks(axis)
        label_line_ends(axis, labelled, HEIGHT_IN - 0.9)
    words = (CAPTION, roof, common)
    return CaptionedFigure(
        caption=" ".join(filter(None, words)), figure=figure, finding=_finding(rows)
    )


def _as_bars(rows: pd.DataFrame, roof: str) -> CaptionedFigure:
    """Bars of the rates, where each panel has a single intensity and so no slope to show."""
    rows = rows[rows["status"] != "unsupported"]
    rows = rows.assign(mark=marks_of(rows))
    bars = int(rows["attention"].nunique())
    figure, drawn, common = panels(rows, SHAPES, width_in=5.3, height_in=0.9 + 0.27 * bars)
    firsts = first_by(rows, "tflops", ("attention",), highest=True)
    top = float(np.nanmax(rows[["tflops", "peak_tflops"]]))
    for axis, group in drawn:
        group = sort_by_points(group, ["attention"])
        draw_bars(
            axis,
            list(group["attention"]),
            list(group["tflops"]),
            [colour(str(name)) for name in group["attention"]],
            words=[fmt.STATUS_WORDS.get(status, fmt.ABSENT) for status in group["status"]],
            marks=list(group["mark"]),
            firsts=[firsts.get(str(case_id)) for case_id in group["case_id"]],
            room=bars,
        )
        for peak in group["peak_tflops"].dropna().unique():
            axis.axvline(peak, color="#444444", linewidth=1)
            axis.annotate(
                "matmul peak",
                (peak, 1.01),
                xycoords=axis.get_xaxis_transform(),
                ha="right",
                fontsize=8,
                color="#444444",
            )
        axis.set_xlim(0, 1.08 * top)
        axis.set_xlabel("TFLOP/s")
    marked = say_marked(rows["mark"], SIGNS)
    words = (CAPTION_OF_BARS, FIRST_WORDS if firsts else "", marked, roof, common)
    return CaptionedFigure(
        caption=" ".join(filter(None, words)), figure=figure, finding=_finding(rows)
    )


def _finding(rows: pd.DataFrame) -> str:
    known = rows[rows["tflops"].notna()]
    shares = (known["tflops"] / known["peak_tflops"]).dropna()
    share = f", {percent_span(shares)} of the matmul peak" if len(shares) else ""
    return sentence(
        f"rates are {span(known['tflops'], fmt.number)} TFLOP/s over all backends and shapes{share}"
    )


def _draw(axis: Axes, rows: pd.DataFrame) -> list[Line2D]:
    """Draw the roof and the points; returns each backend's line."""
    intensities = rows["flops_per_byte"].dropna()
    low, high = intensities.min() / 1.5, intensities.max() * 1.5
    known = rows.dropna(subset=["peak_tflops", "memory_bandwidth_gb_s"])
    if len(known):
        first = known.iloc[0]
        low, high = draw_roof(axis, first["peak_tflops"], first["memory_bandwidth_gb_s"], low, high)
    lines: list[Line2D] = []
    for name in sorted_values(rows, "attention"):
        mine = rows[(rows["attention"] == name) & rows["tflops"].notna()]
        if mine.empty:
            continue
        mine = mine.sort_values("flops_per_byte", kind="stable")
        lines += axis.plot(
            mine["flops_per_byte"],
            mine["tflops"],
            color=colour(name),
            marker=marker(name),
            markeredgecolor="white",
            markeredgewidth=0.4,
            linewidth=0.7,
            label=name,
        )
    out = rows[(rows["status"] == "oom") & rows["flops_per_byte"].notna()]
    mark_out_of_memory(axis, zip(out["flops_per_byte"], out["attention"], strict=True))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel("arithmetic intensity (FLOP/byte)")
    if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axis.set_ylabel("TFLOP/s")
    return lines
