"""Memory that attention keeps for its backward pass, measured and predicted."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.cases.columns import sort_by_points
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.render.rows import of_task, per_case
from harness.reports.attention.lines_over_seq_len import MAX_ROWS, draw_lines
from harness.sentences.findings import percent_span, say_out_of_memory, sentence

CAPTION = (
    "Memory in use between the forward and the backward pass over sequence length, both axes "
    "logarithmic: measured (solid) and predicted from the shapes (dashed); a cross marks where "
    "memory ran out."
)

HEIGHT_IN = 3.3
MAX_COLUMNS = 2


@figure("attention_memory")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    frame = of_task(frame, "attention")
    if frame["seq_len"].nunique() < 2 or frame["before_backward_mib"].isna().all():
        return None
    rows = per_case(frame)
    rows["predicted_mib"] = rows["predicted_before_backward_mib"]
    varying, common = panel_key(rows, ["attention", "seq_len"])
    rows = sort_by_points(rows, [*varying, "attention", "seq_len"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    if len(groups) > MAX_ROWS:
        common = f"The first {MAX_ROWS} of {len(groups)} points. {common}"
        groups = groups[:MAX_ROWS]
    num_columns = min(MAX_COLUMNS, len(groups))
    num_rows = -(-len(groups) // num_columns)
    figure = Figure(
        figsize=(max(5.4, 4.6 * num_columns), HEIGHT_IN * num_rows), layout="constrained"
    )
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    for axis, (_, group) in zip(axes, groups, strict=False):
        draw_lines(
            axis,
            group,
            "before_backward_mib",
            height_in=HEIGHT_IN - 0.9,
            predicted="predicted_mib",
        )
        axis.set_title(describe(group.iloc[0], varying), pad=14)
        axis.set_xlabel("sequence length (tokens)")
        axis.set_ylabel("memory (MiB)")
    styles = {"measured": "-", "predicted": "--"}
    handles = [
        Line2D([], [], color="#444444", linestyle=style, label=name)
        for name, style in styles.items()
    ]
    axes[0].legend(handles=handles, loc="upper left")
    known = rows[rows["before_backward_mib"].notna() & (rows["predicted_mib"] > 0)]
    ratio = known["before_backward_mib"] / known["predicted_mib"]
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(),
        figure=figure,
        finding=sentence(
            f"memory in use is {percent_span(ratio)} of the prediction" if len(ratio) else None,
            say_out_of_memory(rows),
        ),
    )
