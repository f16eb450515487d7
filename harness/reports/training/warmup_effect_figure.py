"""Each measured step's time, by the number of warm-up steps before the measurement."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

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
    # A phase may have finished without samples, and what took no time has no logarithm.
    timed = [isinstance(samples, list) and len(samples) > 0 for samples in rows["samples_ms"]]
    rows = rows[(rows["status"] == "ok") & pd.Series(timed, rows.index, dtype=bool)]
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
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharey="row").ravel()
    logarithmic = _spans_decades(rows)
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
        if logarithmic:
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(FuncFormatter(_minor_tick))
        else:
            axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_title(describe(group.iloc[0], varying))
        axis.set_xlabel("measured step")
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(f"time (ms){', logarithmic' if logarithmic else ''}")
    handles, labels = _known_handles(axes)
    figure.legend(
        handles, labels, title="warm-up steps", loc="outside upper center", ncols=len(labels)
    )
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


def _spans_decades(rows: pd.DataFrame) -> bool:
    """Whether the samples of any panel need a logarithmic axis, which all panels then have."""
    every = [sample for samples in rows["samples_ms"] for sample in samples]
    return min(every) > 0 and any(max(each) > 4 * min(each) for each in rows["samples_ms"])


def _known_handles(axes: Iterable[Axes]) -> tuple[list[Artist], list[str]]:
    """One line for each number of warm-up steps in any panel, least first."""
    found = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    labels = sorted(found, key=int)
    return [found[label] for label in labels], labels


def _minor_tick(tick: float, _: int) -> str:
    """Labels for 2 and 5 of each decade; more would overlap."""
    return f"{tick:,.10g}" if f"{tick:.0e}"[0] in "25" else ""
