"""Time added to a step by bucket size: the model's curve and the measurements."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.cases import format as fmt
from harness.cases.columns import sort_by_points
from harness.drawing.panels import log_ticks
from harness.predictions.training import MIB
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.reports.data.ddp_overhead import say_least_left
from harness.reports.data.step_rows import UNUSED, bucketed
from harness.sentences.findings import sentence

CAPTION = (
    "Overhead of bucketed data parallelism over the size of its buckets, both axes logarithmic: "
    "the model n_b o + s / (n_b w), with o and w fitted to measured all-reduces, for buckets of "
    "exactly that size (line) and for those that the parameters fill (hollow); and measured, "
    "after the backward pass and, in a trace, what did not hide behind computing. Dotted: the "
    "size that the model calls best."
)

MODEL, MEASURED, TRACED = "#555555", "#0072B2", "#D55E00"

WIDTH_IN, HEIGHT_IN = 4.4, 3.4
MAX_PANELS = 4

ACROSS = ("strategy", "measure_steps", "warmup_steps", "collective", "size_mib", *UNUSED)


@figure("ddp_overhead")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = bucketed(frame)
    if rows.empty:
        return None
    # PyTorch's buckets have bounds of their own, and no time after the backward pass.
    rows = rows[rows["communication_median_ms"].notna()]
    if rows["bucket_mib"].nunique() < 2:
        return None
    varying, common = panel_key(rows, ACROSS)
    rows = sort_by_points(rows, [*varying, "strategy"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    groups = groups[:MAX_PANELS]
    drawing = Figure(
        figsize=(max(6.2, WIDTH_IN * len(groups)), HEIGHT_IN + 0.5), layout="constrained"
    )
    axes = drawing.subplots(1, len(groups), squeeze=False, sharey=True).ravel()
    for axis, (_, group) in zip(axes, groups, strict=True):
        axis.set_title(describe(group.iloc[0], varying))
        _draw(axis, group.sort_values("bucket_mib", kind="stable"))
    bottom, top = axes[0].get_ylim()
    axes[0].set_ylim(bottom / 1.3, top * 1.6)
    for axis in axes:
        log_ticks(axis)
    axes[0].set_ylabel("overhead (ms)")
    handles, labels = axes[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside upper center", ncols=4)
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(), figure=drawing, finding=_finding(rows)
    )


def _finding(rows: pd.DataFrame) -> str:
    return sentence(say_least_left(rows[rows["communication_median_ms"].notna()]))


def _draw(axis: Axes, rows: pd.DataFrame) -> None:
    first = rows.iloc[0]
    link, size = first["link"], first["size_bytes"]
    best = link.best_bucket_bytes(size) / MIB
    # Where small and large all-reduces are as fast for their size, a call costs nothing.
    low = min(rows["bucket_mib"].min(), best or np.inf) / 1.5
    high = min(max(rows["bucket_mib"].max(), best) * 1.5, size / MIB)
    buckets = np.geomspace(low, max(high, low * 2), 200)
    curve = [1e3 * link.added_seconds(size, max(1.0, size / MIB / bucket)) for bucket in buckets]
    axis.plot(buckets, curve, color=MODEL, label="model")
    at = rows["bucket_mib"].clip(upper=max(high, low * 2))
    axis.plot(at, rows["model_ms"], "o", mfc="white", mec=MODEL, label="model, real buckets")
    axis.plot(
        at, rows["communication_median_ms"], "s-", color=MEASURED, label="measured after backward"
    )
    axis.plot(at, rows["exposed_ms"], "^-", color=TRACED, label="exposed in trace")
    axis.set_xscale("log")
    axis.set_yscale("log")
    if best:
        axis.axvline(best, color=MODEL, linestyle=":", linewidth=1.2)
        axis.annotate(
            f"{fmt.number(best)} MiB",
            (best, 0.98),
            xycoords=axis.get_xaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            color=MODEL,
            va="top",
        )
    axis.set_xlabel(f"bucket (MiB), of {fmt.number(size / MIB)} MiB of gradients")
