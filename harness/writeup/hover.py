"""Texts that a page shows over points and bars of a figure, and their places in its SVG.

matplotlib's SVG holds shapes without values. Lines with markers, error bars and bars that have
a label are asked for their data here, so that a page can show them under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter

from harness.cases import format as fmt

POINTS_PER_INCH = 72
"""The unit of matplotlib's SVG."""

REACH = 6.0
"""How near to a point the pointer has to be, in that unit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Spot:
    """A rectangle of the SVG and the lines of text that it shows."""

    x: float
    y: float
    width: float
    height: float
    text: str


def spots(figure: Figure) -> Iterator[Spot]:
    """The labelled points and bars of a figure that has been saved as SVG just before."""
    for axes in figure.axes:
        if axes.get_visible():
            yield from _of_axes(axes)


def _of_axes(axes: Axes) -> Iterator[Spot]:
    title = axes.get_title() or axes.get_title("left")
    for line in axes.get_lines():
        if line.get_marker() in ("None", "none", "", " ", None) or not _named(line.get_label()):
            continue
        for x, y in _data(line):
            if math.isnan(x + y):
                continue
            words = (title, line.get_label(), _value(axes.xaxis, x), _value(axes.yaxis, y))
            yield _about(axes, x, y, words)
    for container in axes.containers:
        if not _named(container.get_label()):
            continue
        if isinstance(container, BarContainer):
            yield from _bars(axes, container, title)
        elif isinstance(container, ErrorbarContainer):
            yield from _error_bars(axes, container, title)


def _data(line: Any) -> list[tuple[float, float]]:
    """x and y of each point; NaN where a line has a gap."""
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def _bars(axes: Axes, container: BarContainer, title: str) -> Iterator[Spot]:
    lying = container.orientation == "horizontal"
    for bar in container.patches:
        x, y, width, height = bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()
        if lying:
            words = [title, container.get_label(), _value(axes.xaxis, width)]
        else:
            place = _value(axes.xaxis, x + width / 2)
            words = [title, container.get_label(), place, _value(axes.yaxis, height)]
        left, bottom = _place(axes, x, y)
        right, top = _place(axes, x + width, y + height)
        yield Spot(
            x=min(left, right),
            y=min(bottom, top),
            width=abs(right - left),
            height=abs(top - bottom),
            text=_lines(words),
        )


def _error_bars(axes: Axes, container: ErrorbarContainer, title: str) -> Iterator[Spot]:
    line, _, intervals = container.lines
    segments = intervals[0].get_segments()
    for (x, y), segment in zip(_data(line), segments, strict=True):
        if x != x:
            continue
        interval = ""
        if len(segment) == 2 and segment[0][0] == segment[0][0]:
            low, high = segment[0][0], segment[1][0]
            interval = f"interval: {fmt.number(low)} to {fmt.number(high)}"
        label = str(container.get_label())
        words = (title, _value(axes.yaxis, y), f"{label}: {fmt.factor(x)}", interval)
        yield _about(axes, x, y, words)


def _named(label: Any) -> bool:
    return bool(label) and not str(label).startswith("_")


def _about(axes: Axes, x: float, y: float, words: Any) -> Spot:
    left, top = _place(axes, x, y)
    return Spot(
        x=left - REACH, y=top - REACH, width=2 * REACH, height=2 * REACH, text=_lines(words)
    )


def _lines(words: Any) -> str:
    return "\n".join(str(word) for word in words if word)


def _place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Data coordinates in the SVG's own, whose y runs downwards."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes are drawn in a figure"
    across, up = figure.transFigure.inverted().transform(axes.transData.transform((x, y)))
    width, height = figure.get_size_inches() * POINTS_PER_INCH
    return float(across * width), float((1 - up) * height)


def _value(axis: Axis, value: float) -> str:
    """``sequence length (tokens): 4,096``, or the word that stands at this tick."""
    formatter = axis.get_major_formatter()
    if isinstance(formatter, FixedFormatter):
        words = list(formatter.seq)
        place = list(axis.get_majorticklocs())
        if value in place:
            return str(words[place.index(value)])
    number = f"{value:,.0f}" if float(value).is_integer() else fmt.number(float(value))
    label = axis.get_label_text()
    return f"{label}: {number}" if label else number
