"""Lines over sequence length, one per backend, named at their ends."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.cases.columns import sorted_values
from harness.drawing.line_labels import draw_spread, label_line_ends
from harness.drawing.marked import draw_hollow
from harness.render.palette import colour, marker

MAX_ROWS = 4


def backends_of(rows: pd.DataFrame) -> list[str]:
    return sorted_values(rows, "attention")


def draw_lines(
    axis: Axes,
    rows: pd.DataFrame,
    value: str,
    *,
    height_in: float,
    predicted: str | None = None,
    spread: tuple[str, str] | None = None,
    marks: str | None = None,
) -> None:
    """``value`` over seq_len on log-log axes; a cross at the top where memory ran out.

    ``spread`` names the ends of a bar through each point, ``predicted`` a dashed line,
    ``marks`` the marks of tables.
    """
    lines: list[Line2D] = []
    crosses: list[tuple[float, str]] = []
    for name in backends_of(rows):
        mine = rows[rows["attention"] == name].sort_values("seq_len", kind="stable")
        tint = colour(name)
        shown = mine[mine[value].notna()]
        if predicted is not None:
            line = mine[mine[predicted].notna()]
            axis.plot(line["seq_len"], line[predicted], color=tint, linestyle="--", linewidth=1)
        if len(shown):
            if spread is not None:
                draw_spread(axis, shown["seq_len"], shown[spread[0]], shown[spread[1]], tint)
            lines += axis.plot(
                shown["seq_len"], shown[value], color=tint, marker=marker(name), label=name
            )
            if marks is not None:
                x, y = shown["seq_len"], shown[value]
                draw_hollow(axis, x, y, shown[marks], tint, marker(name))
        crosses += [(seq_len, tint) for seq_len in mine.loc[mine["status"] == "oom", "seq_len"]]
    axis.set_xscale("log", base=2)
    # A host's memory need not have grown at all, and zeros have no logarithm.
    axis.set_yscale("log" if (rows[value] > 0).any() else "linear")
    lengths = sorted(rows["seq_len"].unique())
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: fmt.integer(length)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
    axis.tick_params(axis="x", labelrotation=30 if len(lengths) > 5 else 0)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * 1.6 if crosses else high)
    _draw_crosses(axis, crosses)
    label_line_ends(axis, lines, height_in)


def _draw_crosses(axis: Axes, crosses: list[tuple[float, str]]) -> None:
    """Crosses at the top edge, those of one length below one another."""
    transform = axis.get_xaxis_transform()
    seen: dict[float, int] = {}
    for seq_len, tint in crosses:
        depth = seen.get(seq_len, 0)
        seen[seq_len] = depth + 1
        y = 0.97 - 0.06 * depth
        axis.plot(
            seq_len, y, marker="x", color=tint, transform=transform, markersize=6, clip_on=False
        )
    for seq_len in seen:
        axis.annotate(
            "OOM",
            (seq_len, 0.97),
            xycoords=transform,
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color="#444444",
        )
