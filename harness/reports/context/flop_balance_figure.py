"""FLOPs of each rank by layout, as bars beside the mean."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from harness.cases.columns import caption_of, sort_by_points
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour
from harness.reports.context.balance_rows import counted
from harness.sentences.findings import by_name, sentence, span

MAX_POINTS = 4

MOST_ACROSS = 3
"""Panels side by side."""

CAPTION = (
    "TFLOP of a causal forward pass on each rank, by the pairs that the mask keeps; the line is "
    "a perfect split, and the outline the chunk count of published guides."
)


@figure("flop_balance")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    cases = counted(frame)
    if cases.empty:
        return None
    point = ["num_heads", "head_dim", "seq_len", "ranks"]
    cases = sort_by_points(cases, [*point, "split"])
    groups = list(cases.groupby(point, sort=False))[:MAX_POINTS]
    splits = list(cases["split"].drop_duplicates())
    across = min(len(splits), MOST_ACROSS)
    down = -(-len(splits) // across)
    size = (2.6 * across + 0.4, 2.4 * down * len(groups))
    drawing = Figure(figsize=size, layout="constrained")
    axes = drawing.subplots(down * len(groups), across, squeeze=False)
    for number, (_, group) in enumerate(groups):
        panels = list(axes[number * down : (number + 1) * down].flat)
        for axis, split in zip(panels, splits, strict=False):
            axis.sharey(panels[0])
            _draw(axis, group[group["split"] == split], split)
        for axis in panels[len(splits) :]:
            axis.set_axis_off()
        for axis in panels[::across]:
            axis.set_ylabel("TFLOP")
        words = caption_of(group, point).removeprefix("All rows: ").rstrip(".")
        if len(groups) > 1:
            panels[0].set_title(f"{panels[0].get_title()}\n{words}", fontsize=8)
    common = caption_of(groups[0][1], point) if len(groups) == 1 else ""
    shares = []
    for split in splits:
        over = [
            max(flops) / (sum(flops) / len(flops))
            for balance in cases.loc[cases["split"] == split, "counts"]
            for flops in [balance.per_rank("pair")]
        ]
        shares.append((span(over), str(split)))
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(),
        figure=drawing,
        finding=sentence(f"the busiest rank computes {by_name(shares, 'the mean')}"),
    )


def _draw(axis, cases: pd.DataFrame, split: str) -> None:  # type: ignore[no-untyped-def]
    axis.set_title(split)
    axis.set_xlabel("rank")
    for balance in cases["counts"]:
        pairs = [flops / 1e12 for flops in balance.per_rank("pair")]
        chunks = [flops / 1e12 for flops in balance.per_rank("chunk")]
        ranks = range(len(pairs))
        axis.bar(ranks, pairs, color=colour(split), width=0.75, label=f"{split}, by pairs")
        axis.bar(ranks, chunks, fill=False, edgecolor="#444444", linewidth=0.7, width=0.75)
        axis.axhline(sum(pairs) / len(pairs), color="#000000", linewidth=0.8, linestyle="--")
        axis.set_xticks(list(ranks))
        axis.grid(axis="x", visible=False)
