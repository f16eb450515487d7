"""Tokens per second over ranks, against what one rank's rate promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from harness.cases import format as fmt
from harness.cases.columns import sort_by_points
from harness.drawing.bars import draw_bars
from harness.drawing.marked import FIRST_WORDS, SIGNS, draw_hollow, first_by, say_marked
from harness.drawing.panels import log_ticks
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.render.palette import colour, marker
from harness.reports.data.step_rows import UNUSED
from harness.reports.data.strategy_scaling import scaled
from harness.sentences.findings import sentence, span
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Tokens per second of all ranks together over ranks, both axes logarithmic; dashed: one "
    "rank's rate times the ranks."
)

CAPTION_OF_BARS = (
    "Tokens per second of all ranks together by strategy; dashed: one rank's rate times the ranks."
)

MAX_PANELS = 2

FEW = 2
"""Numbers of ranks that make bars rather than a curve."""


@figure("strategy_scaling")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = scaled(frame)
    if rows.empty:
        return None
    rows = rows[rows["step_tokens_per_s"].notna()]
    if not (rows["world_size"] > 1).any():
        return None
    varying, common = panel_key(rows, ("strategy", "world_size", *UNUSED))
    rows = sort_by_points(rows, [*varying, "strategy", "world_size"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    groups = groups[:MAX_PANELS]
    if rows["world_size"].nunique() <= FEW:
        return _as_bars(rows, groups, varying, common)
    drawing = Figure(figsize=(max(6.4, 4.4 * len(groups)), 4.0), layout="constrained")
    axes = drawing.subplots(1, len(groups), squeeze=False).ravel()
    for axis, (_, group) in zip(axes, groups, strict=True):
        axis.set_title(describe(group.iloc[0], varying))
        alone = group[group["world_size"] == 1]
        ranks = sorted(group["world_size"].unique())
        if len(alone):
            rate = alone["step_tokens_per_s"].iloc[0]
            axis.plot(ranks, [rate * n for n in ranks], "--", color="#999999", label="ideal")
            axis.plot([1], [rate], "o", color="#000000", label="one rank")
        together = group[group["world_size"] > 1]
        for place, (name, line) in enumerate(together.groupby("strategy", sort=True)):
            # Beside each other where lines meet, and all near the ranks that they stand for.
            count = together["strategy"].nunique()
            x = line["world_size"] * (1 + min(0.02, 0.1 / count) * (place - (count - 1) / 2))
            axis.plot(
                x,
                line["step_tokens_per_s"],
                color=colour(str(name)),
                marker=marker(str(name)),
                label=name,
            )
            y, marks = line["step_tokens_per_s"], line["step_mark"]
            draw_hollow(axis, x, y, marks, colour(str(name)), marker(str(name)))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_locator(FixedLocator(ranks))
        axis.xaxis.set_minor_locator(NullLocator())
        log_ticks(axis)
        axis.set_xlabel("ranks")
    axes[0].set_ylabel("tokens/s")
    handles, labels = axes[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside upper center", ncols=4)
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(rows['step_mark'])} {common}".strip(),
        figure=drawing,
        finding=_finding(rows),
    )


def _as_bars(
    rows: pd.DataFrame,
    groups: Sequence[tuple[Any, pd.DataFrame]],
    varying: Sequence[str],
    common: str,
) -> CaptionedFigure:
    """A bar for each strategy, where one or two numbers of ranks make no curve."""
    firsts = first_by(rows, "step_tokens_per_s", ("strategy",), highest=True)
    most = max(len(group) for _, group in groups)
    drawing = Figure(figsize=(7.2, (0.28 * most + 0.7) * len(groups)), layout="constrained")
    axes = drawing.subplots(len(groups), 1, squeeze=False).ravel()
    for axis, (_, group) in zip(axes, groups, strict=True):
        group = sort_by_points(group, ["world_size", "strategy"])
        draw_bars(
            axis,
            [_bar_name(row) for _, row in group.iterrows()],
            list(group["step_tokens_per_s"]),
            [
                "#000000" if row["world_size"] == 1 else colour(str(row["strategy"]))
                for _, row in group.iterrows()
            ],
            marks=list(group["step_mark"]),
            firsts=[firsts.get(str(case_id)) for case_id in group["case_id"]],
        )
        for rate in group.loc[group["world_size"] == 1, "step_tokens_per_s"]:
            ends = [int(ranks) for ranks in group["world_size"].unique() if ranks > 1]
            for ranks in ends:
                axis.axvline(rate * ranks, color="#777777", linewidth=1, linestyle="--")
        axis.set_title(describe(group.iloc[0], varying))
        axis.set_xlabel("tokens/s of all ranks together")
    marked = say_marked(rows["step_mark"], SIGNS)
    words = (CAPTION_OF_BARS, FIRST_WORDS if firsts else "", marked, common)
    return CaptionedFigure(
        caption=" ".join(filter(None, words)), figure=drawing, finding=_finding(rows)
    )


def _bar_name(row: pd.Series) -> str:
    ranks = int(row["world_size"])
    return "one rank" if ranks == 1 else f"{row['strategy']}, {ranks} ranks"


def _finding(rows: pd.DataFrame) -> str:
    most = rows[rows["world_size"] == rows["world_size"].max()]
    return sentence(
        f"on {int(most['world_size'].iloc[0])} ranks strategies train on "
        f"{span(most['step_tokens_per_s'], fmt.number)} tokens a second",
        say_fastest(most, "step_median_ms", ("strategy",)),
    )
