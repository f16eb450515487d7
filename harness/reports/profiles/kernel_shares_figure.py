"""Shares of each phase's kernel time by category."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.analysis.comparison import fullest_mode
from harness.cases import format as fmt
from harness.cases.columns import sort_by_points
from harness.drawing.panels import grid_places, hide_unused
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.render.kernel_rows import (
    by_category,
    passes,
    phases_of,
    profiled,
    rows_of,
    total_ms,
)
from harness.render.palette import KERNEL_COLOURS
from harness.sentences.findings import percent_span, sentence

CAPTION = (
    "Shares of kernel time by what kernels do, for each phase and for the whole step; behind "
    "each bar the time of all its kernels."
)

MAX_PANELS = 20
MAX_COLUMNS = 4
LEAST_LABELLED = 0.11
TITLE_PT = 8.5
"""A model and a length fit on one line above each of four columns."""


@figure("kernel_shares", default=30)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    # A training step's profile holds those of its forward and backward passes.
    rows = fullest_mode(profiled(frame)).drop_duplicates("case_id")
    if rows.empty:
        return None
    varying, common = panel_key(rows, ("profile", "warmup_steps", "measure_steps"))
    rows = sort_by_points(rows, varying) if varying else rows
    if len(rows) > MAX_PANELS:
        common = f"The first {MAX_PANELS} of {len(rows)} points. {common}"
        rows = rows.iloc[:MAX_PANELS]
    places, num_rows, num_columns = grid_places(
        [row for _, row in rows.iterrows()], varying, MAX_COLUMNS
    )
    num_bars = max(len(phases_of(profile)) for profile in rows["kernel_profile"])
    height = 0.9 + num_rows * (0.6 + 0.28 * num_bars)
    drawing = Figure(figsize=(max(6.4, 3.0 * num_columns), height), layout="constrained")
    grid = drawing.subplots(num_rows, num_columns, squeeze=False, sharex=True)
    hide_unused(grid.ravel(), [grid[place] for place in places])
    used: set[str] = set()
    for place, (_, row) in zip(places, rows.iterrows(), strict=True):
        axis = grid[place]
        profile = row["kernel_profile"]
        phases = phases_of(profile)
        for bar, phase in enumerate(phases):
            kernels = rows_of(profile, phase)
            shares, total, left = by_category(kernels), total_ms(kernels), 0.0
            for category, tint in KERNEL_COLOURS.items():
                width = 100 * shares.get(category, 0.0) / total if total else 0.0
                if not width:
                    continue
                used.add(category)
                axis.barh(bar, width, left=left, height=0.72, color=tint, linewidth=0)
                if width > 100 * LEAST_LABELLED:
                    pale = category in ("copy", "attention", "elementwise", "reduction")
                    axis.text(
                        left + width / 2,
                        bar,
                        fmt.percent(width / 100),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="black" if pale else "white",
                    )
                left += width
            words = f"{fmt.number(total / passes(profile))} ms"
            axis.text(101, bar, words, va="center", fontsize=7)
        axis.set_yticks(range(len(phases)), phases if place[1] == 0 else [""] * len(phases))
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlim(0, 100)
        axis.set_title(describe(row, varying), fontsize=TITLE_PT)
        if (place[0] + 1, place[1]) not in places:
            axis.set_xlabel("share of kernel time (%)")
            axis.tick_params(labelbottom=True)
    handles = [
        Patch(facecolor=tint, label=name) for name, tint in KERNEL_COLOURS.items() if name in used
    ]
    drawing.legend(handles=handles, loc="outside upper center", ncols=min(5, len(handles)))
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(), figure=drawing, finding=_finding(rows)
    )


def _finding(rows: pd.DataFrame) -> str:
    shares = []
    for profile in rows["kernel_profile"]:
        kernels = [row for phase in phases_of(profile) for row in rows_of(profile, phase)]
        total = total_ms(kernels)
        if total:
            shares.append(by_category(kernels).get("matmul", 0.0) / total)
    if not shares:
        return sentence("no kernel took time")
    return sentence(f"matmuls take {percent_span(shares)} of the time that kernels take")
