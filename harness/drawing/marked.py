"""Marks of tables in figures: hollow markers on lines, symbols behind the numbers of bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from harness.cases import format as fmt
from harness.sentences.findings import by_margin
from harness.sentences.ranking import standings

WORDS: Mapping[str, str] = {
    fmt.DAGGER: "disturbed",
    fmt.DOUBLE_DAGGER: "compiled again",
    fmt.DOUBLE_BAR: "bound by the host",
    fmt.DIAMOND: "of other code than now",
    fmt.OPEN_TRIANGLE_DOWN: "without a result when measured again",
    fmt.CIRCLED_SLASH: "impossible",
    fmt.PILCROW: "long before or after the baseline",
    fmt.TRIANGLE: "on another host than the baseline",
}
"""What each mark of a time says, in a caption's words."""

SIGNS = "Numbers with a sign"
"""The subject of :func:`say_marked` where marks stand behind numbers."""

BAR_WORDS = "from the fastest to the slowest round (between quartiles of fewer than three)"
"""The bar from ``low_ms`` to ``high_ms`` of a frame's row, in a caption's words."""


def draw_hollow(
    axes: Axes, x: pd.Series, y: pd.Series, marks: pd.Series, tint: str, shape: str
) -> None:
    """Hollow the markers of the points that tables mark; drawn after their line."""
    marked = marks.map(lambda text: isinstance(text, str) and bool(text)).astype(bool)
    if marked.any():
        axes.plot(
            x[marked],
            y[marked],
            color=tint,
            marker=shape,
            markerfacecolor="white",
            linestyle="none",
            label="_marked",
        )


def say_marked(marks: Iterable[object], how: str = "Hollow markers") -> str:
    """A caption's sentence on the marks that occur, with how often; empty without any."""
    texts = [text for text in marks if isinstance(text, str) and text]
    counts = {symbol: sum(symbol in text for text in texts) for symbol in WORDS}
    words = [f"{number} {WORDS[symbol]} ({symbol})" for symbol, number in counts.items() if number]
    return f"{how} are marked in the tables: {', '.join(words)}." if words else ""


FIRST_WORDS = (
    "Bold: first at its point by verdicts, and by how much over the next; where none is bold, "
    "others are level or it cannot be told."
)
"""Bold numbers, in a caption's words; where :func:`first_by` found one."""


def first_by(
    rows: pd.DataFrame, value: str, varied: Sequence[str], *, highest: bool = False
) -> dict[str, str]:
    """``first by 12%`` for the case id of each row that verdicts call first at its point."""
    found = standings(rows, value, varied, highest=highest)
    return {
        str(standing.best["case_id"]): f"first {by_margin(standing.margin)}"
        for standing in found
        if standing.first
    }
