"""Time of a decoding step launched kernel by kernel, and replayed as a CUDA graph."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import POINTS
from harness.drawing.bars import draw_bars
from harness.drawing.marked import SIGNS, say_marked
from harness.drawing.panels import panels
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour
from harness.render.rows import speedup_over, verdict_over
from harness.reports.decoding.step_rows import UNUSED, decoded
from harness.sentences.findings import sentence, span

CAPTION = "Median time of a decoding step without and with a CUDA graph."


@figure("graph_effect")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = decoded(frame)
    if rows.empty or rows["cuda_graph"].nunique() < 2 or rows["step_us"].isna().all():
        return None
    across = ["attention", "cuda_graph", *UNUSED]
    bars = len(rows.drop_duplicates(["attention", "cuda_graph"]))
    drawing, drawn, common = panels(rows, across, width_in=5.0, height_in=1.0 + 0.3 * bars)
    for axis, group in drawn:
        pairs = group.sort_values("cuda_graph", kind="stable")
        pairs = pairs.sort_values(
            "attention", key=lambda names: names.map(POINTS["attention"].rank), kind="stable"
        )
        names = [
            f"{row['attention']}, graph" if row["cuda_graph"] else str(row["attention"])
            for _, row in pairs.iterrows()
        ]
        tints = [colour(str(name)) for name in pairs["attention"]]
        words = [fmt.STATUS_WORDS.get(status, fmt.ABSENT) for status in pairs["status"]]
        draw_bars(
            axis, names, list(pairs["step_us"]), tints, words=words, marks=list(pairs["mark"])
        )
        axis.set_xlabel("step (µs)")
    eager = ~rows["cuda_graph"].astype(bool)
    gains = speedup_over(rows, "step_us", ["cuda_graph"], eager)
    verdicts = verdict_over(rows, "decode_evidence", ["cuda_graph"], eager)
    gains = gains[~eager].dropna()
    clear = gains[verdicts[gains.index].isin(["FASTER", "SLOWER", "SAME"])]
    words_of = "no graph ran here"
    if len(gains):
        cases = "in the one case" if len(gains) == 1 else f"in any of {len(gains)} cases"
        words_of = f"whether a graph is faster cannot be told {cases}"
    if len(clear):
        words_of = f"a step as a graph is {span(clear)} as fast, where verdicts tell"
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(rows['mark'], SIGNS)} {common}".strip(),
        figure=drawing,
        finding=sentence(words_of),
    )
