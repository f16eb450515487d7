"""Memory against time of every combination, with the front that none beats in both."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from harness.recommend.combination import Combination
from harness.recommend.predicting import front
from harness.render.figure import STYLE, CaptionedFigure
from harness.render.palette import colour, marker

MOST_NAMES = 9
"""Strategies or backends that the legend names; others are grey."""

GREY = "#AAAAAA"


def build(drawn: Sequence[Combination], best: Combination | None) -> CaptionedFigure | None:
    """One point for each combination, hollow if captured; the recommended one is ringed."""
    items = [item for item in drawn if item.step_ms is not None]
    if len(items) < 2:
        return None
    with mpl.rc_context(STYLE):
        return _drawn(items, best)


def _drawn(items: list[Combination], best: Combination | None) -> CaptionedFigure:
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axis = figure.subplots()
    several = len({item.base.parallel.name for item in items}) > 1
    names = [_name(item, several) for item in items]
    often = sorted(set(names), key=lambda name: (-names.count(name), name))
    named = often[:MOST_NAMES]
    for name in sorted(named):
        own = [item for item, known in zip(items, names, strict=True) if known == name]
        _points(axis, own, colour(name), marker(name), name)
    rest = [
        item for item, known in zip(items, names, strict=True) if known not in often[:MOST_NAMES]
    ]
    if rest:
        _points(axis, rest, GREY, ".", f"{len(often) - MOST_NAMES} others")
    line = front(items)
    axis.plot(
        [item.memory_gib for item in line],
        [_speed(item) for item in line],
        color="black",
        linewidth=1.0,
        drawstyle="steps-post",
        label="front",
        zorder=4,
    )
    if best is not None and best.step_ms is not None:
        axis.plot(
            [best.memory_gib],
            [_speed(best)],
            marker="o",
            markersize=12,
            markerfacecolor="none",
            markeredgecolor="black",
            markeredgewidth=1.6,
            linestyle="none",
            label="recommended",
            zorder=5,
        )
    axis.set_xlabel("predicted memory on one rank (GiB)")
    axis.set_ylabel("tokens per second")
    axis.set_yscale("log")
    for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        ticks(StrMethodFormatter("{x:,.0f}"))
    figure.legend(loc="outside right upper")
    kind = "strategy" if several else "attention"
    hollow = " Hollow: captured in CUDA graphs, at the memory of the same step launched."
    captured = hollow if any(item.is_captured for item in items) else ""
    return CaptionedFigure(
        name="front",
        caption=(
            f"Predicted memory and tokens per second of {len(items):,} combinations that fit, by "
            f"{kind}; measured times where there are some. On the black front, no other "
            f"combination is faster with as little memory.{captured}"
        ),
        figure=figure,
    )


def _points(axis: Axes, items: list[Combination], tint: str, sign: str, name: str) -> None:
    launched = [item for item in items if not item.is_captured]
    captured = [item for item in items if item.is_captured]
    # The legend names a strategy by its launched points, none or not.
    for own, face, text in ((launched, tint, name), (captured, "none", None)):
        axis.plot(
            [item.memory_gib for item in own],
            [_speed(item) for item in own],
            marker=sign,
            markersize=3.5,
            linestyle="none",
            color=tint,
            markerfacecolor=face,
            alpha=0.8,
            label=text,
        )


def _name(item: Combination, several: bool) -> str:
    return item.base.parallel.name if several else item.base.attention.name


def _speed(item: Combination) -> float:
    assert item.step_ms is not None
    return item.tokens_per_s(item.step_ms)
