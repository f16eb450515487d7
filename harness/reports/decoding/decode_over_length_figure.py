"""Time of a decoding step as the cache grows, beside what the memory's bandwidth allows."""

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
from harness.sentences.findings import say_out_of_memory, sentence
from harness.sentences.leaders import say_over_length

WIDTH_IN, HEIGHT_IN = 4.8, 3.0

CAPTION = (
    "Median time of a decoding step over the tokens in each cache, both axes "
    "logarithmic (bars where there are one or two lengths), with a bar"
    f" {BAR_WORDS}. The dotted line is the time of the bytes that have to "
    "move at the measured copy bandwidth; a cross above the frame marks where memory ran out."
)


@figure("decode_over_length", default=60)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = decoded(frame)
    if rows.empty or rows["seq_len"].nunique() < 2 or rows["step_us"].isna().all():
        return None
    across = [*SERIES, "seq_len", *UNUSED]
    rows = with_several(rows, "seq_len", across)
    rows = rows.assign(low=rows["decode_low_ms"] * 1e3, high=rows["decode_high_ms"] * 1e3)
    drawing, drawn, common = size_panels(rows, across, "seq_len", WIDTH_IN, HEIGHT_IN)
    for axis, group in drawn:
        if group["seq_len"].nunique() <= FEW:
            draw_size_bars(axis, group, "seq_len", "step_us", word="length", least="predicted_us")
            axis.set_xlabel("step (µs)")
            continue
        axis.set_yscale("log")
        least = group.groupby("seq_len")["predicted_us"].median().dropna()
        axis.plot(least.index, least, color="#000000", linewidth=0.9, linestyle=":")
        draw_series(
            axis, group, "seq_len", "step_us", height_in=HEIGHT_IN - 0.9, low="low", high="high"
        )
        axis.set_xlabel("tokens in each cache")
        axis.set_ylabel("step (µs)")
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(rows['mark'])} {common}".strip(),
        figure=drawing,
        finding=sentence(
            say_over_length(rows, "step_us", evidence="decode_evidence"), say_out_of_memory(rows)
        )
        or "Longer caches take longer.",
    )
