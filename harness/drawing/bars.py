"""Lying bars, one beside the other, with their numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.cases import format as fmt

LONG_NUMBERS = 1e6
"""Numbers from here on are so long that only a few of them stand beside each other on an axis."""


def draw_bars(
    axis: Axes,
    names: Sequence[str],
    values: Sequence[float],
    tints: Sequence[str],
    *,
    words: Sequence[str] | None = None,
    marks: Sequence[str] | None = None,
    firsts: Sequence[str | None] | None = None,
    room: int = 0,
) -> None:
    """One bar for each name, from the top down; a missing value leaves its place empty.

    Args:
        marks: the signs that tables put behind the values, which follow the numbers here too.
        firsts: how far each is ahead, where verdicts call it first; its number is bold.
        room: places for bars, so that those of panels with fewer are as thick.
    """
    largest = max((value for value in values if not fmt.is_missing(value)), default=1.0)
    for place, (value, tint) in enumerate(zip(values, tints, strict=True)):
        if fmt.is_missing(value):
            text, end = (words[place] if words is not None else fmt.ABSENT), 0.0
        else:
            axis.barh(place, value, height=0.7, color=tint)
            text, end = fmt.number(value) + (marks[place] if marks is not None else ""), value
        first = firsts[place] if firsts is not None else None
        axis.text(
            end + 0.01 * largest,
            place,
            text + (f" ({first})" if first else ""),
            va="center",
            fontsize=8,
            fontweight="bold" if first else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(max(len(names), room) - 0.5, -0.5)
    axis.xaxis.set_major_locator(MaxNLocator(5 if largest < LONG_NUMBERS else 3))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
    axis.set_xlim(0, (1.5 if firsts is not None and any(firsts) else 1.18) * largest)
    axis.grid(axis="y", visible=False)
