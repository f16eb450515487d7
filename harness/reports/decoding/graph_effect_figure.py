"""Time of a decoding step launched kernel by kernel, and replayed as a CUDA graph."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups, sort_by_points
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
    rows = rows[rows["status"] != "unsupported"]
    across = ["attention", "cache", "cuda_graph", *UNUSED]
    panel = point_groups(rows, [name for name in across if name in POINTS])
    bars = int(rows.groupby(panel).size().max())
    drawing, drawn, common = panels(rows, across, width_in=5.0, height_in=1.0 + 0.3 * bars)
    for axis, group in drawn:
        pairs = sort_by_points(group, ["attention", "cache", "cuda_graph"])
        several = pairs["cache"].nunique() > 1
        names = [_name(row, several) for _, row in pairs.iterrows()]
        tints = [colour(str(name)) for name in pairs["attention"]]
        words = [fmt.STATUS_WORDS.get(status, fmt.ABSENT) for status in pairs["status"]]
        draw_bars(
            axis,
            names,
            list(pairs["step_us"]),
            tints,
            words=words,
            marks=list(pairs["mark"]),
            room=bars,
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


def _name(row: pd.Series, name_cache: bool) -> str:
    words = [row["attention"], *([row["cache"]] if name_cache else [])]
    return ", ".join(map(str, [*words, "graph"] if row["cuda_graph"] else words))
