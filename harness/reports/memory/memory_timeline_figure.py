"""Memory over one step, stacked by what it holds (problem memory_profiling, question a)."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.analysis.case_columns import GIB, MIB
from harness.cases import format as fmt
from harness.cases.columns import sort_by_points
from harness.drawing.panels import grid_places, hide_unused
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.render.palette import MEMORY_COLOURS
from harness.sentences.findings import sentence

CAPTION = (
    "Memory that tensors hold during one step, by what it is for, over the host's clock while it "
    "queues the work; dashed lines begin and end the phases, the dot is the peak. All panels have "
    "the same scale of memory."
)

MAX_PANELS = 12
MAX_COLUMNS = 2
HEIGHT_IN = 2.2

TITLE_WIDTH = 46
"""Letters of a line over a panel."""


@figure("memory_timeline", default=50)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = frame[frame["memory_profile"].notna() & (frame["status"] == "ok")]
    if rows.empty:
        return None
    rows = rows.drop_duplicates("case_id")
    varying, common = panel_key(rows, ("profile", "warmup_steps", "measure_steps"))
    rows = sort_by_points(rows, varying) if varying else rows
    if len(rows) > MAX_PANELS:
        # The longest sequences, where there is most to see.
        rows = rows[rows["seq_len"] == rows["seq_len"].max()]
        common = f"The first {MAX_PANELS} of the longest sequences. {common}"
        rows = rows.iloc[:MAX_PANELS]
    places, num_rows, num_columns = grid_places(
        [row for _, row in rows.iterrows()], varying, MAX_COLUMNS
    )
    drawing = Figure(
        figsize=(max(6.4, 4.6 * num_columns), HEIGHT_IN * num_rows + 0.5), layout="constrained"
    )
    grid = drawing.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    hide_unused(grid.ravel(), [grid[place] for place in places])
    used: set[str] = set()
    peak_bytes = max(profile["peak_bytes"] for profile in rows["memory_profile"])
    for place, (_, row) in zip(places, rows.iterrows(), strict=True):
        axis = grid[place]
        used |= _draw(axis, row["memory_profile"], peak_bytes)
        axis.set_title(fill(describe(row, varying), TITLE_WIDTH), pad=16)
        if place[1] == 0:
            axis.set_ylabel(f"allocated ({_unit(peak_bytes)[1]})")
        if (place[0] + 1, place[1]) not in places:
            axis.set_xlabel("time (ms)")
    handles = [
        Patch(facecolor=tint, label=name) for name, tint in MEMORY_COLOURS.items() if name in used
    ]
    drawing.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 6))
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(), figure=drawing, finding=_finding(rows)
    )


def _finding(rows: pd.DataFrame) -> str:
    peaks = [profile["peak_bytes"] / MIB for profile in rows["memory_profile"]]
    low, high = fmt.number(min(peaks)), fmt.number(max(peaks))
    return sentence(f"peaks are {low if low == high else f'{low} to {high}'} MiB")


def _unit(peak_bytes: float) -> tuple[int, str]:
    return (GIB, "GiB") if peak_bytes >= GIB else (MIB, "MiB")


def _draw(axis: Axes, profile: dict[str, Any], peak_bytes: float) -> set[str]:
    """Draw one timeline below the figure's peak; returns the categories that it has."""
    unit, name = _unit(peak_bytes)
    times, series = profile["times_ms"], profile["series"]
    names = [category for category in MEMORY_COLOURS if category in series]
    # What is allocated stays so until the next event: steps, and not slopes.
    axis.stackplot(
        [moment for pair in zip(times, [*times[1:], times[-1]], strict=True) for moment in pair],
        [[value / unit for value in series[category] for _ in range(2)] for category in names],
        colors=[MEMORY_COLOURS[category] for category in names],
        linewidth=0,
        # Thousands of steps: as pixels they take a tenth of what they take as vectors.
        rasterized=True,
    )
    end = times[-1] or 1.0
    top = 1.12 * peak_bytes / unit
    axis.set_xlim(0, end)
    axis.set_ylim(0, top)
    for phase, start, stop in profile["phases"]:
        for moment in {start, stop}:
            axis.axvline(moment, color="#333333", linewidth=0.7, linestyle=(0, (4, 3)))
        if stop - start > 0.09 * end:
            axis.annotate(
                phase,
                ((start + stop) / 2, 1.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize=7.5,
                color="#333333",
            )
    peak, moment = profile["peak_bytes"] / unit, profile["peak_ms"]
    axis.plot(moment, peak, "o", color="black", markersize=3.5, clip_on=False, zorder=5)
    right = moment > 0.75 * end
    axis.annotate(
        f"{fmt.number(peak)} {name}",
        (moment, peak),
        xytext=(-5 if right else 5, 1),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=7.5,
    )
    return set(names)
