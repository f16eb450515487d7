"""Figures: how one is built and saved, and the style that all share.

A figure is one file in ``harness/reports`` whose ``build(frame)`` returns a captioned
matplotlib figure.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, ScalarFormatter
from PIL import Image

from harness.cases.columns import POINTS, USUAL, caption_of, redundant_points
from harness.render.registries import FIGURES

ON_BAR_LIGHT, ON_BAR_DARK = "#FFFFFE", "#000001"
"""Text on a coloured bar: not quite white and black, which a dark page would exchange."""

STYLE: dict[str, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "savefig.dpi": 150,
    # Element ids of an SVG are random without a salt.
    "svg.hashsalt": "attnbench",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@dataclass(kw_only=True, slots=True)
class CaptionedFigure:
    """A drawn figure and the words under it."""

    name: str = ""
    caption: str
    figure: Figure
    finding: str = ""
    """One sentence on the result that it shows, computed from its data."""


figure = FIGURES.register


def build_figure(name: str, frame: pd.DataFrame) -> CaptionedFigure | None:
    """The figure ``name`` over the frame; None where the frame has nothing for it."""
    if frame.empty:
        return None
    with mpl.rc_context(STYLE):
        built: CaptionedFigure | None = FIGURES[name].target(frame)
        if built is not None:
            built.name = name
            _without_formulas(built.figure)
            _with_separators(built.figure)
            wrap_titles(built.figure)
    return built


def _without_formulas(drawing: Figure) -> None:
    """Show a dollar sign in a name as one, which would begin a formula that may not parse."""
    for found in drawing.findobj(Text):
        if isinstance(found, Text) and "$" in found.get_text():
            found.set_parse_math(False)


def _with_separators(drawing: Figure) -> None:
    """Write the numbers of linear axes as tables do, 63,000, where nothing else was chosen."""
    for axes in drawing.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), ScalarFormatter):
                axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))


_LEAST_LETTER = 0.4
"""Mean width of letters, in units of their size, that no title stays below."""

_FEWEST_LETTERS = 12
"""In a line of a title that was broken."""

_MOST_BREAKS = 4
"""How often a title is measured, and broken into shorter lines."""


def wrap_titles(drawing: Figure) -> None:
    """Break titles that would reach into the panel beside theirs, or out of the figure."""
    texts = {axes: axes.get_title() for axes in drawing.axes if _may_be_too_wide(drawing, axes)}
    # A title that was broken leaves its panel other room, and letters differ in width.
    for _ in range(_MOST_BREAKS if texts else 0):
        drawing.draw_without_rendering()
        rooms = {axes: _room(drawing, axes) for axes in texts}
        rooms = {axes: room for axes, room in rooms.items() if 0 < room < 1}
        if not rooms:
            return
        for axes, room in rooms.items():
            longest = max(map(len, axes.get_title().splitlines()))
            letters = max(_FEWEST_LETTERS, min(longest - 1, int(longest * room)))
            axes.title.set_text(fill(texts[axes], letters))


def _room(drawing: Figure, axes: Axes) -> float:
    """The room for a panel's title over its width."""
    left, right = _column_of(drawing, axes)
    extent = axes.title.get_window_extent()
    centre = (extent.x0 + extent.x1) / 2
    return 2 * min(centre - left, right - centre) / extent.width


def _may_be_too_wide(drawing: Figure, axes: Axes) -> bool:
    if axes.get_subplotspec() is None or "\n" in axes.get_title():
        return False
    left, right = _column_of(drawing, axes)
    letter = _LEAST_LETTER * float(axes.title.get_fontsize()) * drawing.dpi / 72
    return len(axes.get_title()) * letter > (right - left) / 3


def _column_of(drawing: Figure, axes: Axes) -> tuple[float, float]:
    """Left and right end of the panel's column in the figure, in pixels."""
    spec = axes.get_subplotspec()
    assert spec is not None, "asked of panels alone"
    num_columns = spec.get_gridspec().ncols
    column = drawing.bbox.width / num_columns
    return spec.colspan.start * column, spec.colspan.stop * column


_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Metadata that differs between runs or library versions, left out of files."""


_PALETTE = 256
"""Colours of a PNG: one byte a pixel takes a third of the room of four."""


def save(built: CaptionedFigure, format: str, **style: Any) -> bytes:
    """The figure as ``png``, ``svg`` or ``pdf``; the bytes depend on the figure alone."""
    data = io.BytesIO()
    with mpl.rc_context(STYLE | style):
        built.figure.savefig(data, format=format, metadata=_METADATA[format])
    return _with_palette(data) if format == "png" else data.getvalue()


def _with_palette(data: io.BytesIO) -> bytes:
    """A PNG whose pixels are indices of colours; shades between two lines become the nearest."""
    with Image.open(data) as image:
        dpi = image.info["dpi"]
        picture = image.convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE)
    smaller = io.BytesIO()
    picture.save(smaller, "PNG", optimize=True, dpi=dpi)
    return smaller.getvalue()


class Drawn(NamedTuple):
    """A figure as files, and what is said of it."""

    caption: str
    png: bytes
    svg: bytes
    finding: str


def draw(name: str, frame: pd.DataFrame) -> Drawn | None:
    """The figure ``name`` over the frame; None where the frame has nothing for it."""
    built = build_figure(name, frame)
    if built is None:
        return None
    return Drawn(built.caption, save(built, "png"), save(built, "svg"), built.finding)


def panel_key(rows: pd.DataFrame, across: Iterable[str]) -> tuple[list[str], str]:
    """Point columns that vary beyond ``across``, and the sentence on those that do not."""
    across = set(across)
    ignored = {*across, "memory_source", "device"} | redundant_points(rows, across)
    names = [name for name in POINTS if name not in ignored]
    names = [name for name in names if name in rows]
    varying = [name for name in names if POINTS[name].varies(rows[name])]
    return varying, caption_of(rows, [name for name in names if name not in varying])


def describe(row: pd.Series, names: Iterable[str]) -> str:
    """The row's values of ``names`` as text, without those that are what is usual."""
    given = (name for name in names if row[name] == row[name])
    told = (name for name in given if name not in USUAL or row[name] != row.get(USUAL[name]))
    words = (POINTS[name].describe(row[name]) for name in told)
    return ", ".join(word for word in words if word)
