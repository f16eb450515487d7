"""Memory that attention keeps for its backward pass, measured and predicted."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D

from harness.drawing.panels import panels
from harness.render.figure import CaptionedFigure, figure, panel_key
from harness.render.rows import of_task, per_case
from harness.reports.attention.lines_over_seq_len import draw_lines, series_of, shared_limits
from harness.sentences.findings import percent_span, say_out_of_memory, sentence

CAPTION = (
    "Memory in use between the forward and the backward pass over sequence length, both axes "
    "logarithmic: measured (solid) and predicted from the shapes (dashed); a cross marks where "
    "memory ran out."
)

WIDTH_IN, HEIGHT_IN = 4.6, 3.2


@figure("attention_memory")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    frame = of_task(frame, "attention")
    if frame["seq_len"].nunique() < 2 or frame["before_backward_mib"].isna().all():
        return None
    rows = per_case(frame)
    rows["predicted_mib"] = rows["predicted_before_backward_mib"]
    across = ["attention", "seq_len"]
    series = series_of(rows, panel_key(rows, across)[0])
    across += [series] if series else []
    drawing, drawn, common = panels(
        rows, across, width_in=WIDTH_IN, height_in=HEIGHT_IN, share_y=True
    )
    for axis, group in drawn:
        draw_lines(
            axis,
            group,
            "before_backward_mib",
            height_in=HEIGHT_IN - 0.8,
            predicted="predicted_mib",
            series=series or "attention",
            limits=shared_limits(rows, ["before_backward_mib", "predicted_mib"]),
        )
        axis.set_xlabel("sequence length (tokens)")
        axis.set_ylabel("memory (MiB)")
    styles = {"measured": "-", "predicted": "--"}
    handles = [
        Line2D([], [], color="#444444", linestyle=style, label=name)
        for name, style in styles.items()
    ]
    drawn[0][0].legend(handles=handles, loc="upper left")
    known = rows[rows["before_backward_mib"].notna() & (rows["predicted_mib"] > 0)]
    ratio = known["before_backward_mib"] / known["predicted_mib"]
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(),
        figure=drawing,
        finding=sentence(
            f"memory in use is {percent_span(ratio)} of the prediction" if len(ratio) else None,
            say_out_of_memory(rows),
        ),
    )
