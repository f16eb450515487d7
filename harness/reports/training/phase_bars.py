"""Stacked bars of a step's phases: one panel per point, one bar per category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from harness.analysis.comparison import fullest_mode
from harness.cases import format as fmt
from harness.cases.columns import POINTS, sort_by_points
from harness.drawing.marked import BAR_WORDS, FIRST_WORDS, SIGNS, first_by, say_marked
from harness.drawing.panels import grid_places, hide_unused
from harness.render.figure import CaptionedFigure, describe, panel_key
from harness.render.palette import colour, mixed_with_white
from harness.render.rows import of_task, per_case
from harness.sentences.findings import percent_span, say_out_of_memory, sentence
from harness.sentences.leaders import say_fastest

PHASES = {"forward": 1.0, "backward": 0.62, "optimizer": 0.3}
"""How dark each phase is."""

WHOLE = (
    "Numbers and ticks are the medians of whole steps, as in the tables: those of its phases need "
    f"not add up to it. The thin line spans the whole step {BAR_WORDS}."
)

MAX_PANELS = 12
MAX_COLUMNS = 3


def phase_bars(
    frame: pd.DataFrame,
    category: str,
    caption: str,
    columns: Sequence[str] = (),
    tint: str | None = None,
) -> CaptionedFigure | None:
    """Bars of ``category`` (``attention``, ``precision``), in milliseconds per phase.

    Args:
        columns: the columns in which bars of one panel differ; ``category`` if not given.
        tint: the column that colours the bars; ``category`` if not given.
    """
    frame = of_task(frame, "train_step")
    if frame.empty:
        return None
    # The bars of a training step hold those of its forward and backward passes.
    rows = per_case(
        fullest_mode(frame), phases=(*PHASES, "step"), values=("median_ms", "low_ms", "high_ms")
    )
    if rows[[f"{phase}_median_ms" for phase in PHASES]].isna().all(axis=None):
        return None
    columns = [*columns] or [category]
    tint = tint or category
    varying, common = panel_key(rows, columns)
    order = [name for name in columns if name in POINTS]
    names = sort_by_points(rows, order)[category].unique().tolist()
    rows = sort_by_points(rows, [*varying, *order])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    panels = [(describe(group.iloc[0], varying), group) for _, group in groups[:MAX_PANELS]]
    if len(groups) > MAX_PANELS:
        common = f"The first {MAX_PANELS} of {len(groups)} points. {common}"
    places, num_rows, num_columns = grid_places(
        [group.iloc[0] for _, group in panels], varying, MAX_COLUMNS
    )
    # A line of panels has the bars that one of them needs.
    lines = [
        [name for name in names if any(name in {*panels[at][1][category]} for at in mine)]
        for mine in (
            [at for at, place in enumerate(places) if place[0] == line] for line in range(num_rows)
        )
    ]
    heights = [0.55 + 0.3 * len(line) for line in lines]
    figure = Figure(figsize=(max(4.8, 3.4 * num_columns), 0.9 + sum(heights)), layout="constrained")
    # Panels of one row share their axis where they are one model at several precisions.
    shared: Literal["row", "none"] = "none"
    if "precision" in varying and len(varying) > 1:
        shared = "row"
    grid = figure.subplots(
        num_rows, num_columns, squeeze=False, sharex=shared, height_ratios=heights
    )
    hide_unused(grid.ravel(), [grid[place] for place in places])
    firsts = first_by(rows, "step_median_ms", columns)
    longest: dict[int, float] = {}
    for place, (title, group) in zip(places, panels, strict=True):
        axis = grid[place]
        bars = dict.fromkeys(lines[place[0]]) | dict(zip(group[category], group[tint], strict=True))
        end = _draw(axis, group, category, bars, firsts, show_names=place[1] == 0)
        longest[place[0]] = max(end, longest.get(place[0], 0.0)) if shared == "row" else end
        axis.set_xlim(0, 1.3 * longest[place[0]] or 1)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
        axis.set_title(title)
        if (place[0] + 1, place[1]) not in places:
            axis.set_xlabel("median time (ms)")
    present = [phase for phase in PHASES if rows[f"{phase}_status"].notna().any()]
    handles = [
        Patch(facecolor=mixed_with_white(colour("naive"), PHASES[phase]), label=phase)
        for phase in present
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    said = say_marked(rows["mark"], SIGNS)
    return CaptionedFigure(
        caption=" ".join(
            filter(None, (caption, WHOLE, FIRST_WORDS if firsts else "", said, common))
        ),
        figure=figure,
        finding=sentence(
            say_fastest(rows, "step_median_ms", columns) or _largest_part(rows),
            say_out_of_memory(rows, category) if category in POINTS else None,
        ),
    )


def _largest_part(rows: pd.DataFrame) -> str | None:
    """The phase that takes most of a step's time."""
    shares = rows[[f"{phase}_median_ms" for phase in PHASES]].median()
    if shares.isna().all():
        return None
    phase = str(shares.idxmax()).removesuffix("_median_ms")
    return f"{phase} takes {percent_span([shares.max() / shares.sum()])} of the time (median)"


def _draw(
    axis: Axes,
    rows: pd.DataFrame,
    category: str,
    bars: Mapping[str, str | None],
    firsts: Mapping[str, str],
    *,
    show_names: bool,
) -> float:
    """The bars of one panel; returns where the longest ends.

    Args:
        bars: the name of each, and what has its colour; None where the panel has no such bar.
    """
    by_name = rows.drop_duplicates(category).set_index(category).to_dict("index")
    longest = 0.0
    for place, (name, tint) in enumerate(bars.items()):
        if tint is None:
            continue
        row = by_name[name]
        if row["status"] != "ok":
            axis.annotate(
                fmt.STATUS_WORDS[row["status"]],
                (0, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                style="italic",
                color=colour(tint),
            )
            continue
        left = 0.0
        for phase, share in PHASES.items():
            value = row[f"{phase}_median_ms"]
            if value == value:
                axis.barh(
                    place,
                    value,
                    left=left,
                    height=0.72,
                    color=mixed_with_white(colour(tint), share),
                    label=f"{name}, {phase}",
                )
                left += value
        end = _draw_whole(axis, row, place, left, firsts.get(str(row["case_id"])))
        longest = max(longest, end)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_yticks(range(len(bars)), list(bars) if show_names else [""] * len(bars))
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    return longest


def _draw_whole(
    axis: Axes, row: Mapping[Any, Any], place: int, left: float, first: str | None
) -> float:
    """The whole step's median and spread, and its number; returns where they end."""
    whole = row["step_median_ms"]
    if whole != whole:
        return left
    ends = [row["step_low_ms"], row["step_high_ms"]]
    axis.plot(ends, [place, place], color="#222222", linewidth=1.2, solid_capstyle="butt")
    axis.plot([whole, whole], [place - 0.36, place + 0.36], color="#222222", linewidth=1.2)
    end = max(value for value in (left, whole, *ends) if value == value)
    axis.annotate(
        f"{fmt.number(whole)}{row['mark']}" + (f" ({first})" if first else ""),
        (end, place),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        fontweight="bold" if first else "normal",
    )
    return end
