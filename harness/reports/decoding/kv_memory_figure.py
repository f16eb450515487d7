"""Memory of a cache over the length of its sequences, by type of attention."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.cases.columns import sorted_values
from harness.drawing.line_labels import label_line_ends
from harness.drawing.panels import panels
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour
from harness.reports.decoding.kv_memory import NO_USE, counted
from harness.sentences.findings import sentence

CAPTION = (
    "Memory of all layers' caches over the tokens of each sequence, both axes logarithmic; above "
    "the dashed line, the memory to be filled, they do not fit."
)

WIDTH_IN, HEIGHT_IN = 4.6, 2.8


@figure("kv_memory", default=80)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = counted(frame)
    if rows.empty or rows["seq_len"].nunique() < 2:
        return None
    across = {*NO_USE, "num_kv_heads", "layers", "cache", "attention_type", "seq_len"}
    drawing, drawn, common = panels(
        rows, across, width_in=WIDTH_IN, height_in=HEIGHT_IN, share_y=True
    )
    lengths = sorted(rows["seq_len"].unique())
    for axis, group in drawn:
        lines: list[Line2D] = []
        for name in sorted_values(group, "attention_type"):
            mine = group[group["attention_type"] == name].sort_values("seq_len")
            words, tint = str(name).upper(), colour(name)
            lines += axis.plot(
                mine["seq_len"], mine["total_gib"], color=tint, marker="o", label=words
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for size in group["device_gib"].unique():
            words = f"{fmt.number(size)} GiB"
            lines.append(
                axis.axhline(size, color="#000000", linewidth=0.9, linestyle="--", label=words)
            )
        axis.xaxis.set_major_locator(FixedLocator(lengths))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: fmt.integer(length)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
        axis.tick_params(axis="x", labelrotation=30 if len(lengths) > 5 else 0)
        axis.set_xlabel("tokens of each sequence")
        axis.set_ylabel("GiB")
        label_line_ends(axis, lines, HEIGHT_IN - 0.9)
    out = rows[~rows["fits"].astype(bool)]
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(),
        figure=drawing,
        finding=sentence(f"{len(out)} of {len(rows)} caches do not fit"),
    )
