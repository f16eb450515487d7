"""How the time of attention grows with sequence length, by backend."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from harness.cases.columns import sort_by_points
from harness.drawing.marked import BAR_WORDS, say_marked
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.render.rows import of_task, per_case
from harness.reports.attention.lines_over_seq_len import (
    MAX_ROWS,
    draw_lines,
    series_of,
    shared_limits,
)
from harness.sentences.findings import say_growth, say_out_of_memory, sentence
from harness.sentences.leaders import say_over_length

CAPTION = (
    "Median time of the attention call over sequence length, both axes logarithmic, with a bar "
    f"{BAR_WORDS}; a cross marks where memory ran out."
)

ROW_HEIGHT_IN = 3.1


@figure("attention_scaling", default=20)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    frame = of_task(frame, "attention")
    if frame["seq_len"].nunique() < 2:
        return None
    rows = per_case(
        frame, phases=("forward", "backward"), values=("median_ms", "low_ms", "high_ms")
    )
    if rows[["forward_median_ms", "backward_median_ms"]].isna().all(axis=None):
        return None
    phases = [phase for phase in ("forward", "backward") if rows[f"{phase}_status"].notna().any()]
    varying, common = panel_key(rows, ["attention", "seq_len"])
    rows = sort_by_points(rows, [*varying, "attention", "seq_len"])
    series = series_of(rows, varying)
    varying = [name for name in varying if name != series]
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    if len(groups) > MAX_ROWS:
        common = f"The first {MAX_ROWS} of {len(groups)} points. {common}"
        groups = groups[:MAX_ROWS]
    figure = Figure(figsize=(5.0 * len(phases), ROW_HEIGHT_IN * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), len(phases), squeeze=False, sharex=True, sharey=True)
    ends = ("median_ms", "low_ms", "high_ms")
    limits = shared_limits(rows, [f"{phase}_{end}" for phase in phases for end in ends])
    for line, (_, group) in zip(axes, groups, strict=True):
        words = describe(group.iloc[0], varying)
        for axis, phase in zip(line, phases, strict=True):
            draw_lines(
                axis,
                group,
                f"{phase}_median_ms",
                height_in=ROW_HEIGHT_IN - 0.8,
                spread=(f"{phase}_low_ms", f"{phase}_high_ms"),
                marks=f"{phase}_mark",
                series=series or "attention",
                limits=limits,
            )
            axis.set_title(", ".join(word for word in (phase, words) if word), pad=14)
        line[0].set_ylabel("median time (ms)")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length (tokens)")
    found = []
    for phase in phases:
        value = f"{phase}_median_ms"
        growth = say_growth(rows, value)
        found.append(say_over_length(rows, value) or (growth and f"attention {growth}"))
    parts = [f"in the {name} pass {said}" for name, said in zip(phases, found, strict=True) if said]
    return CaptionedFigure(
        caption=f"{CAPTION} {_said(rows, phases)} {common}".strip(),
        figure=figure,
        finding=sentence(*parts, say_out_of_memory(rows)),
    )


def _said(rows: pd.DataFrame, phases: list[str]) -> str:
    return say_marked(mark for phase in phases for mark in rows[f"{phase}_mark"])
