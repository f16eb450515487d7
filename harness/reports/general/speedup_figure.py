"""Speed-ups as dots with their intervals: over naive attention, float32, no compilation, or DDP."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from harness.analysis.comparison import AXES, Axis, comparable, compare, fullest_mode
from harness.cases import format as fmt
from harness.cases.columns import POINTS, sort_by_points
from harness.drawing.marked import draw_hollow, say_marked
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.render.palette import MARKERS, colour, colour_unlike, marker
from harness.render.rows import marks_of
from harness.sentences.findings import say_over, sentence

CAPTION = (
    "Speed-up in median time over the baseline, with its interval over rounds where there is one "
    "wider than the dot; a cross at the left edge marks a candidate that ran out of memory."
)

MAX_ROWS = 24

NOTHING_TOLD = "No speed-up can be told."


@figure("speedup")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    panels: list[tuple[Axis, pd.DataFrame]] = []
    candidates = fullest_mode(comparable(frame))
    # Forward alone would double the lines of attention; it is in the table.
    whole = candidates["phase"] != "forward"
    candidates = candidates[whole] if whole.any() else candidates
    for axis in AXES.values():
        rows = compare(candidates, axis)
        out = rows["status"] == "oom"
        rows = rows[(rows["ratio"].notna() | out) & (rows["baseline"] == axis.baseline)]
        rows = rows.assign(mark=marks_of(rows) + rows["apart_mark"])
        if rows["ratio"].notna().any():
            panels.append((axis, rows))
    if not panels:
        return None
    _, common = panel_key(pd.concat([rows for _, rows in panels]), [])
    labelled = [(axis, *_label_rows(rows, axis)) for axis, rows in panels]
    if any(len(labels) == MAX_ROWS for _, _, labels in labelled):
        common = f"At most {MAX_ROWS} points; the comparison table has all. {common}"
    heights = [0.9 + 0.27 * len(labels) for _, _, labels in labelled]
    longest = max(len(label) for _, _, labels in labelled for label in labels)
    legend = max(len(_series(row, axis)) for axis, rows in panels for _, row in rows.iterrows())
    figure = Figure(figsize=(4.4 + 0.065 * (longest + legend), sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).ravel()
    for drawn, (axis, rows, labels) in zip(axes, labelled, strict=True):
        _draw(drawn, rows, labels, axis)
    found = [
        say_over(rows, "ratio", "verdict", axis.baseline or "", axis.choice, axis.words)
        for axis, rows in panels
    ]
    marks = pd.concat([rows.loc[rows["ratio"].notna(), "mark"] for _, rows, _ in labelled])
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(marks)} {common}".strip(),
        figure=figure,
        finding=sentence(*found) or NOTHING_TOLD,
    )


def _label_rows(rows: pd.DataFrame, axis: Axis) -> tuple[pd.DataFrame, list[str]]:
    """Rows with the line that each dot stands on, and the words of the lines."""
    varying, _ = panel_key(rows, axis.columns)
    rows = sort_by_points(rows, [*varying, axis.choice])
    several = rows["phase"].nunique() > 1
    words = [
        ", ".join(
            part for part in (describe(row, varying), row["phase"] if several else "") if part
        )
        for _, row in rows.iterrows()
    ]
    labels = list(dict.fromkeys(words))[:MAX_ROWS]
    rows = rows.assign(line=[labels.index(word) if word in labels else -1 for word in words])
    return rows[rows["line"] >= 0], labels


def _series(row: pd.Series, axis: Axis) -> str:
    """The candidate's name, with whatever else the choice decides: ``model, max-autotune``."""
    values = {name: row[name] for name in axis.columns if name != axis.choice}
    others = [POINTS[name].describe(value) for name, value in values.items() if value == value]
    return ", ".join([str(row[axis.choice]), *filter(None, others)])


def _draw(axes: Axes, rows: pd.DataFrame, labels: list[str], axis: Axis) -> None:
    rows = rows.assign(series=[_series(row, axis) for _, row in rows.iterrows()])
    tints: set[str] = set()
    shapes: set[str] = set()
    names = list(dict.fromkeys(sort_by_points(rows, axis.columns)["series"]))
    for place, label in enumerate(names):
        mine = rows[rows["series"] == label]
        name = str(mine[axis.choice].iloc[0])
        # A further mode of a choice has another colour too: at this size markers look alike.
        tint = colour(name) if colour(name) not in tints else colour_unlike(tints)
        shape = next((some for some in (marker(name), *MARKERS) if some not in shapes), "o")
        tints.add(tint)
        shapes.add(shape)
        # A little apart, so that none hides another.
        line = mine["line"] + 0.2 * (place - (len(names) - 1) / 2)
        below, above = mine["ratio"] - mine["ratio_low"], mine["ratio_high"] - mine["ratio"]
        axes.errorbar(
            mine["ratio"],
            line,
            xerr=[below.clip(lower=0), above.clip(lower=0)],
            linestyle="none",
            marker=shape,
            color=tint,
            label=label,
            alpha=0.9,
        )
        draw_hollow(axes, mine["ratio"], line, mine["mark"], tint, shape)
    for _, row in rows[rows["status"] == "oom"].iterrows():
        axes.annotate(
            f"{fmt.TIMES} OOM",
            (0, row["line"]),
            xycoords=axes.get_yaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=colour(row[axis.choice]),
        )
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_xscale("log", base=2)
    ends = [*rows["ratio"].dropna(), 1.0]
    ends += [*rows["ratio_low"].dropna(), *rows["ratio_high"].dropna()]
    axes.set_xlim(min(ends) / 1.2, max(ends) * 1.2)
    fine = max(ends) / min(ends) < 4
    axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5) if fine else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:.3g}{fmt.TIMES}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_title(f"speed-up {axis.words}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
