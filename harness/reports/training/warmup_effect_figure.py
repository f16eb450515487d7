"""Each measured step's time, by the number of warm-up steps before the measurement."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from harness.cases.columns import sort_by_points
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.reports.training.warmup_effect import headline
from harness.sentences.findings import sentence, span

CAPTION = "Time of every measured step, in order, by the number of warm-up steps before them."

MAX_PANELS = 6
MAX_COLUMNS = 3

MARKERS = "osD^vPX*"


@figure("warmup_effect")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = headline(frame)
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return None
    varying, common = panel_key(rows, ["warmup_steps"])
    rows = sort_by_points(rows, [*varying, "warmup_steps"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    if len(groups) > MAX_PANELS:
        common = f"The first {MAX_PANELS} of {len(groups)} points. {common}"
        groups = groups[:MAX_PANELS]
    num_columns = min(MAX_COLUMNS, len(groups))
    num_rows = -(-len(groups) // num_columns)
    figure = Figure(figsize=(max(5.4, 3.4 * num_columns), 3.1 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    counts = sorted(rows["warmup_steps"].unique())
    shades = mpl.colormaps["viridis"].resampled(256)
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    for axis, (_, group) in zip(axes, groups, strict=False):
        for warmup_steps, samples in zip(group["warmup_steps"], group["samples_ms"], strict=True):
            place = counts.index(warmup_steps)
            axis.plot(
                range(1, len(samples) + 1),
                samples,
                color=shades(0.85 * place / max(1, len(counts) - 1)),
                marker=MARKERS[place % len(MARKERS)],
                label=f"{int(warmup_steps)}",
            )
        every = [sample for samples in group["samples_ms"] for sample in samples]
        if max(every) > 4 * min(every):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
            if max(every) > 40 * min(every):
                axis.yaxis.set_minor_formatter(NullFormatter())
            else:
                axis.yaxis.set_minor_formatter(FuncFormatter(_minor_tick))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_title(describe(group.iloc[0], varying))
        axis.set_xlabel("measured step")
        axis.set_ylabel("time (ms)")
    axes[0].legend(title="warm-up steps", loc="upper right")
    firsts = rows["samples_ms"].map(lambda samples: samples[0]) / rows["median_ms"]
    least = rows["warmup_steps"] == counts[0]
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(),
        figure=figure,
        finding=sentence(
            f"with {int(counts[0])} warm-up steps the first measured step takes "
            f"{span(firsts[least])} the median",
            f"with {int(counts[-1])} it takes {span(firsts[rows['warmup_steps'] == counts[-1]])}"
            if len(counts) > 1
            else None,
        ),
    )


def _minor_tick(tick: float, _: int) -> str:
    """Labels for 2 and 5 of each decade; more would overlap."""
    return f"{tick:,.10g}" if f"{tick:.0e}"[0] in "25" else ""
