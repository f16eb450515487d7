"""Share of the copy bandwidth that a decoding step reaches as the batch grows."""

from __future__ import annotations

import pandas as pd

from harness.drawing.marked import BAR_WORDS, say_marked
from harness.render.figure import CaptionedFigure, figure
from harness.reports.decoding.decode_lines import (
    FEW,
    SERIES,
    draw_series,
    draw_size_bars,
    size_panels,
    with_several,
)
from harness.reports.decoding.step_rows import UNUSED, decoded
from harness.sentences.findings import by_name, percent_span, sentence

WIDTH_IN, HEIGHT_IN = 4.8, 3.0

BARS_END = 1.18
"""All panels of bars end at the same share, which leaves room for numbers behind the longest."""

CAPTION = (
    "Bytes that have to move over the median time of a decoding step, as a share of the copy "
    "bandwidth that the same process measured, over the sequences of the batch (bars where there "
    f"are one or two sizes), with a bar for times {BAR_WORDS}. The dotted line is the copy "
    "bandwidth; a cross above the frame marks where memory ran out."
)


@figure("decode_over_batch", default=70)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = decoded(frame)
    if rows.empty or rows["copy_share"].isna().all():
        return None
    across = [*SERIES, "batch_size", *UNUSED]
    rows = with_several(rows, "batch_size", across)
    if rows.empty or rows["copy_share"].isna().all():
        return None
    percent = 100 * rows["copy_share"]
    rows = rows.assign(
        percent=percent,
        low=percent * rows["decode_median_ms"] / rows["decode_high_ms"],
        high=percent * rows["decode_median_ms"] / rows["decode_low_ms"],
    )
    drawing, drawn, common = size_panels(rows, across, "batch_size", WIDTH_IN, HEIGHT_IN)
    for axis, group in drawn:
        if group["batch_size"].nunique() <= FEW:
            draw_size_bars(axis, group, "batch_size", "percent", word="batch")
            axis.set_xlim(0, BARS_END * max(100.0, float(rows["percent"].max())))
            axis.axvline(100, color="#000000", linewidth=0.9, linestyle=":")
            axis.set_xlabel("of the copy bandwidth (%)")
            continue
        axis.set_ylim(0, max(100.0, 1.05 * float(group["high"].max())))
        axis.axhline(100, color="#000000", linewidth=0.9, linestyle=":")
        draw_series(
            axis, group, "batch_size", "percent", height_in=HEIGHT_IN - 0.9, low="low", high="high"
        )
        axis.set_xlabel("sequences in the batch")
        axis.set_ylabel("of the copy bandwidth (%)")
    shares = rows.groupby("attention")["copy_share"]
    words = [(percent_span(part), str(name)) for name, part in shares if part.notna().any()]
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(rows['mark'])} {common}".strip(),
        figure=drawing,
        finding=sentence(f"steps reach {by_name(words, 'of the copy bandwidth')}"),
    )
