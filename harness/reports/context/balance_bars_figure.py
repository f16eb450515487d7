"""Computing time of every rank, scheme by scheme: bars of equal height are a balanced split."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from harness.cases import format as fmt
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour
from harness.reports.context.split_panels import ACROSS, calls_by_panel
from harness.sentences.findings import by_name, sentence

CAPTION = (
    "Computing per rank, forward and backward, from kernel times in traced passes; the line is "
    "the mean over ranks."
)

MAX_COLUMNS = 5


@figure("balance_bars")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    panels, _ = calls_by_panel(frame, tuple(name for name in ACROSS if name != "seq_len"))
    if not panels:
        return None
    rows = pd.concat([rows for _, rows in panels])
    rows = rows[rows["compute_ms"].notna()]
    if rows.empty:
        return None
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    rows = rows[rows["seq_len"] == rows["seq_len"].max()]
    rows = rows[rows["kernel"] == rows["kernel"].iloc[0]]
    # One transport of each scheme: what is computed does not depend on it.
    rows = rows.drop_duplicates("scheme")
    num_columns = min(MAX_COLUMNS, len(rows))
    num_rows = -(-len(rows) // num_columns)
    drawing = Figure(
        figsize=(max(4.0, 1.75 * num_columns + 0.4), 2.3 * num_rows), layout="constrained"
    )
    axes = drawing.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    for axis in axes.ravel()[len(rows) :]:
        axis.set_visible(False)
    for axis, (_, row) in zip(axes.ravel(), rows.iterrows(), strict=False):
        ranks, compute = range(len(row["compute_ms"])), row["compute_ms"]
        axis.bar(ranks, compute, color=colour(row["scheme"]), width=0.75, label=row["scheme"])
        axis.axhline(sum(compute) / len(compute), color="#000000", linewidth=0.8, linestyle="--")
        axis.set_title(row["scheme"], fontsize=9)
        axis.set_xlabel("rank")
        axis.set_xticks(list(ranks))
        axis.grid(axis="x", visible=False)
    for axis in axes[:, 0]:
        axis.set_ylabel("computing (ms)")
    first = rows.iloc[0]
    words = (
        f"{int(first['world_size'])} ranks, {fmt.integer(first['seq_len'])} tokens, "
        f"kernel {first['kernel']}."
    )
    return CaptionedFigure(
        caption=f"{CAPTION} {words}",
        figure=drawing,
        finding=sentence(f"the busiest rank computes {by_name(_busiest(rows), 'the mean')}"),
    )


def _busiest(rows: pd.DataFrame) -> list[tuple[str, str]]:
    return [
        (fmt.factor(max(x) / (sum(x) / len(x))), str(name))
        for name, x in zip(rows["scheme"], rows["compute_ms"], strict=True)
    ]
