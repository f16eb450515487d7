"""Shares of each phase's kernel time by category."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.cases import format as fmt
from harness.cases.columns import sort_by_points
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

MAX_PANELS = 12
MAX_COLUMNS = 3
LEAST_LABELLED = 0.08


@figure("kernel_shares", default=30)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = profiled(frame).drop_duplicates("case_id")
    if rows.empty:
        return None
    varying, common = panel_key(rows, ("profile", "warmup_steps", "measure_steps"))
    rows = sort_by_points(rows, varying) if varying else rows
    if len(rows) > MAX_PANELS:
        common = f"The first {MAX_PANELS} of {len(rows)} points. {common}"
        rows = rows.iloc[:MAX_PANELS]
    num_columns = min(MAX_COLUMNS, len(rows))
    num_rows = -(-len(rows) // num_columns)
    num_bars = max(len(phases_of(profile)) for profile in rows["kernel_profile"])
    height = 0.9 + num_rows * (0.6 + 0.28 * num_bars)
    drawing = Figure(figsize=(max(6.4, 3.6 * num_columns), height), layout="constrained")
    axes = drawing.subplots(num_rows, num_columns, squeeze=False, sharex=True).ravel()
    used: set[str] = set()
    for axis in axes[len(rows) :]:
        axis.set_visible(False)
    for place, (axis, (_, row)) in enumerate(zip(axes, rows.iterrows(), strict=False)):
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
                        f"{width:.0f}",
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="black" if pale else "white",
                    )
                left += width
            words = f"{fmt.number(total / passes(profile))} ms"
            axis.text(101, bar, words, va="center", fontsize=7)
        axis.set_yticks(range(len(phases)), phases)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlim(0, 100)
        axis.set_title(describe(row, varying))
        if place + num_columns >= len(rows):
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
