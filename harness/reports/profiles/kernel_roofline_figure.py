"""Every profiled kernel under the roofline: which ones the device's memory holds back.

FLOPs and bytes are those that the operator must do at least, from its shapes
(:mod:`harness.profilers.kernels.categories`); those of fused attention follow from the model's.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.cases.columns import sort_by_points
from harness.drawing.panels import log_ticks
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.render.kernel_rows import profiled
from harness.render.palette import KERNEL_COLOURS
from harness.render.roof import draw_roof, with_measured_roof
from harness.sentences.findings import sentence

CAPTION = (
    "Kernels of one training step by arithmetic intensity and achieved rate, both axes "
    "logarithmic; the area of a point is its share of all kernel time. FLOPs and bytes are the "
    "least that the operator's shapes ask for, so that a kernel whose inputs are in a cache may "
    "lie above the slope. Copies do no FLOPs and have no place here."
)

MAX_PANELS = 4
MAX_COLUMNS = 2
WIDTH_IN, HEIGHT_IN = 5.0, 3.4
LEAST_SHARE = 1e-3
LARGEST_AREA = 420.0

HEADROOM = 2.5
"""Room above the roof, for its label."""


@figure("kernel_roofline", default=40)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = profiled(frame).drop_duplicates("case_id")
    rows = rows[[bool(_points(profile)) for profile in rows["kernel_profile"]]]
    if rows.empty:
        return None
    rows, roof = with_measured_roof(frame, rows)
    varying, common = panel_key(rows, ("profile", "warmup_steps", "measure_steps"))
    rows = sort_by_points(rows, varying) if varying else rows
    if len(rows) > MAX_PANELS:
        common = f"The first {MAX_PANELS} of {len(rows)} points. {common}"
        rows = rows.iloc[:MAX_PANELS]
    num_columns = min(MAX_COLUMNS, len(rows))
    num_rows = -(-len(rows) // num_columns)
    drawing = Figure(
        figsize=(max(6.0, WIDTH_IN * num_columns), HEIGHT_IN * num_rows + 0.5),
        layout="constrained",
    )
    axes = drawing.subplots(num_rows, num_columns, squeeze=False).ravel()
    used: set[str] = set()
    # On a CPU rates are thousandths of what a GPU reaches.
    in_gflops = bool((rows["device"] == "cpu").all())
    for axis in axes[len(rows) :]:
        axis.set_visible(False)
    for place, (axis, (_, row)) in enumerate(zip(axes, rows.iterrows(), strict=False)):
        used |= _draw(axis, row, in_gflops)
        axis.set_title(describe(row, varying))
        if place % num_columns == 0:
            axis.set_ylabel("GFLOP/s" if in_gflops else "TFLOP/s")
        if place + num_columns >= len(rows):
            axis.set_xlabel("arithmetic intensity (FLOP/byte)")
    handles = [
        Line2D([], [], color=tint, marker="o", linestyle="", label=name)
        for name, tint in KERNEL_COLOURS.items()
        if name in used
    ]
    drawing.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    words = (CAPTION, roof, common)
    return CaptionedFigure(
        caption=" ".join(filter(None, words)), figure=drawing, finding=_finding(rows)
    )


def _finding(rows: pd.DataFrame) -> str:
    points = [point for profile in rows["kernel_profile"] for point in _points(profile)]
    return sentence(f"{len(points)} kernels have FLOPs to count, the rest moves data alone")


def _points(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows whose FLOPs and bytes are known, long enough to be seen."""
    whole = sum(row["total_ms"] for row in profile["rows"])
    return [
        row
        for row in profile["rows"]
        if row["flops"] and row["bytes"] and row["total_ms"] > LEAST_SHARE * whole
    ]


def _draw(axis: Axes, row: pd.Series, in_gflops: bool) -> set[str]:
    points = _points(row["kernel_profile"])
    whole = sum(item["total_ms"] for item in row["kernel_profile"]["rows"])
    intensities = [item["flops"] / item["bytes"] for item in points]
    low, high = min(intensities) / 1.6, max(intensities) * 1.6
    if row[["peak_tflops", "memory_bandwidth_gb_s"]].notna().all():
        peaks = (float(row["peak_tflops"]), float(row["memory_bandwidth_gb_s"]))
        low, high = draw_roof(axis, *peaks, low, high, in_gflops=in_gflops)
    # The largest first, so that none hides a smaller one.
    for item, intensity in sorted(
        zip(points, intensities, strict=True), key=lambda pair: -pair[0]["total_ms"]
    ):
        axis.scatter(
            intensity,
            item["flops"] / item["total_ms"] / (1e6 if in_gflops else 1e9),
            s=8 + LARGEST_AREA * item["total_ms"] / whole,
            color=KERNEL_COLOURS[item["category"]],
            alpha=0.75,
            edgecolors="white",
            linewidths=0.5,
            zorder=3,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * HEADROOM)
    log_ticks(axis)
    return {item["category"] for item in points}
