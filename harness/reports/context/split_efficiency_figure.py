"""Which family of schemes splits a sequence best, over the tokens that each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.drawing.line_labels import draw_spread, label_line_ends
from harness.drawing.marked import BAR_WORDS, draw_hollow
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour, marker
from harness.reports.context.families import FAMILIES, family_of
from harness.reports.context.split_panels import ACROSS, calls_by_panel
from harness.reports.context.split_rows import launching
from harness.sentences.findings import listed, percent_span, say_unlike, sentence
from harness.sentences.ranking import Standing, standings

WIDTH_IN, HEIGHT_IN = 4.8, 3.0

CAPTION = (
    "The best scheme and transport of each family against one device: the time of the same kernel "
    "on one device with the whole sequence, divided by the ranks, over that of attention split "
    "over them. 100% is a perfect split; below the dashed line one device alone is as fast. A bar "
    f"is of times {BAR_WORDS}. A hollow marker stands where the device and the ranks were measured "
    "at clocks over 2% apart, by two revisions or over ten minutes apart."
)

CIRCLED = "A circled point is first by verdicts; a dotted line stands where the first one changes."
OPEN = "No family is first by verdicts at any length, so that no point is circled."
GRAPHS = (
    "Lines of passes as CUDA graphs are solid; those of the same passes launched one by one are "
    "dash-dotted."
)
OUT_OF_MEMORY = "A cross: every scheme of the family ran out of memory."

VARIED = ("family", "scheme", "transport", "attention", "modes", "strategy", "gathers")


@figure("split_efficiency")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    # What graphs gain is the distance of two lines in one panel.
    panels, common = calls_by_panel(frame, (*ACROSS, "cuda_graph"))
    panels = [(title, _by_family(rows)) for title, rows in panels]
    panels = [(title, rows) for title, rows in panels if rows["efficiency"].notna().any()]
    if not panels:
        return None
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    drawing = Figure(
        figsize=(max(6.4, WIDTH_IN * num_columns), HEIGHT_IN * num_rows + 0.2),
        layout="constrained",
    )
    axes = drawing.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    for axis in axes.ravel()[len(panels) :]:
        axis.set_visible(False)
    found: list[Standing] = []
    lines: list[tuple[Axes, list[Line2D]]] = []
    for axis, (title, rows) in zip(axes.ravel(), panels, strict=False):
        axis.set_title(title)
        there = _standings(rows)
        lines.append((axis, _draw(axis, rows)))
        _mark_firsts(axis, there)
        found += there
    axes[0, 0].set_ylim(bottom=0)
    for axis, mine in lines:
        label_line_ends(axis, mine, HEIGHT_IN - 0.9)
    for axis in axes[:, 0]:
        axis.set_ylabel("efficiency (%)")
    drawn = pd.concat([rows for _, rows in panels])
    known = drawn.dropna(subset=["efficiency"])
    return CaptionedFigure(
        caption=" ".join(filter(None, (CAPTION, _say_marks(found, drawn), common))),
        figure=drawing,
        finding=sentence(
            _say_first(found),
            _say_span(known),
            say_unlike(known["unlike"], "efficiency", "the one device"),
        ),
    )


def _by_family(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest row of each family at each length, or one that says why there is none.

    Of passes as CUDA graphs, and of those launched one by one.
    """
    rows = rows.assign(
        family=rows["scheme"].map(family_of),
        local_tokens=rows["seq_len"] / rows["world_size"],
    )
    rows = rows.sort_values("whole_ms", kind="stable", na_position="last")
    rows = rows.drop_duplicates(["family", "cuda_graph", "local_tokens"])
    places = {name: place for place, name in enumerate(FAMILIES)}
    order = rows["family"].map(lambda name: (places.get(name, len(places)), name))
    return rows.assign(order=order).sort_values(["order", "local_tokens"], kind="stable")


def _standings(rows: pd.DataFrame) -> list[Standing]:
    return standings(rows.drop(columns=["order", "local_tokens"]), "whole_ms", VARIED)


def _tint(family: str) -> str:
    return FAMILIES[family].colour if family in FAMILIES else colour(family)


def _shape(family: str) -> str:
    return FAMILIES[family].marker if family in FAMILIES else marker(family)


def _draw(axis: Axes, rows: pd.DataFrame) -> list[Line2D]:
    """The lines of one panel, by family and by how passes are started, without their labels."""
    lines: list[Line2D] = []
    axis.set_xscale("log", base=2)
    both = rows["cuda_graph"].nunique() > 1
    for (name, graphed), mine in rows.groupby(["family", "cuda_graph"], sort=False):
        family = str(name)
        label = f"{family}, {launching(bool(graphed))}" if both else family
        style = "-." if both and not graphed else "-"
        shown, tint = mine[mine["efficiency"].notna()], _tint(family)
        _mark_out_of_memory(axis, mine, tint)
        if shown.empty:
            continue
        x, percent = shown["local_tokens"], 100 * shown["efficiency"]
        low, high = (
            percent * shown["whole_ms"] / shown[f"whole_{end}_ms"] for end in ("high", "low")
        )
        draw_spread(axis, x, low, high, tint)
        lines += axis.plot(
            x, percent, color=tint, marker=_shape(family), linestyle=style, label=label
        )
        draw_hollow(axis, x, percent, shown["unlike_mark"], tint, _shape(family))
    num_ranks = int(rows["world_size"].iloc[0])
    axis.axhline(100, color="#444444", linewidth=0.8)
    axis.axhline(100 / num_ranks, color="#444444", linewidth=0.8, linestyle="--")
    lengths = sorted(rows["local_tokens"].unique())
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: fmt.integer(length)))
    axis.set_xlabel("tokens per rank")
    return lines


def _mark_out_of_memory(axis: Axes, rows: pd.DataFrame, tint: str) -> None:
    """A cross just above the frame at each length for which the family had no memory."""
    for length in rows.loc[rows["status"] == "oom", "local_tokens"]:
        axis.text(
            *(length, 1.02, fmt.TIMES),
            transform=axis.get_xaxis_transform(),
            color=tint,
            ha="center",
            fontsize=11,
            fontweight="bold",
        )


def _mark_firsts(axis: Axes, found: list[Standing]) -> None:
    """Circles around the first of each length, and lines between two that differ."""
    for one in found:
        if one.first and one.best["efficiency"] == one.best["efficiency"]:
            axis.plot(
                *([_local(one)], [100 * one.best["efficiency"]]),
                marker="o",
                markersize=11,
                markerfacecolor="none",
                markeredgecolor=_tint(one.first),
                label=f"_first {one.first}",
            )
    for before, after in _changes(found):
        middle = (_local(before) * _local(after)) ** 0.5
        axis.axvline(middle, color="#444444", linewidth=0.9, linestyle=":")
        axis.annotate(
            f"{before.first} | {after.first}",
            (middle, 0.03),
            xycoords=axis.get_xaxis_transform(),
            ha="center",
            fontsize=7,
            color="#444444",
            backgroundcolor="white",
        )


def _changes(found: list[Standing]) -> Iterator[tuple[Standing, Standing]]:
    """Neighbouring lengths of one panel at which two families are first, of one kind of passes."""
    ordered = sorted(found, key=lambda one: (bool(one.best["cuda_graph"]), _local(one)))
    for before, after in pairwise(ordered):
        alike = before.best["cuda_graph"] == after.best["cuda_graph"]
        if alike and before.first and after.first and before.first != after.first:
            yield before, after


def _local(standing: Standing) -> float:
    """Tokens that each rank holds."""
    return float(standing.best["seq_len"] / standing.best["world_size"])


def _say_marks(found: list[Standing], rows: pd.DataFrame) -> str:
    firsts = (CIRCLED if any(one.first for one in found) else OPEN) if found else None
    graphs = GRAPHS if rows["cuda_graph"].nunique() > 1 else None
    crosses = OUT_OF_MEMORY if (rows["status"] == "oom").any() else None
    return " ".join(filter(None, (graphs, firsts, crosses)))


def _say_first(found: list[Standing]) -> str | None:
    """Which families are first at how many of the points, by verdicts."""
    counts = pd.Series([one.first for one in found], dtype=object).value_counts()
    if not found:
        return None
    if counts.empty:
        return f"no family is first by verdicts at any of {fmt.counted(len(found), 'point')}"
    words = [f"{name} at {number}" for name, number in counts.items()]
    return f"first by verdicts, of {fmt.counted(len(found), 'point')}: {listed(words)}"


def _say_span(known: pd.DataFrame) -> str | None:
    alike = known.loc[known["unlike_mark"] == "", "efficiency"]
    if alike.empty:
        return None
    where = "over families, ranks and lengths" if len(alike) == len(known) else "where clear"
    return f"the best of a family has an efficiency of {percent_span(alike)} {where}"
