"""What a figure is, and the look that all figures share.

A figure is one file in ``harness/figures`` whose ``build(frame)`` returns a captioned
matplotlib figure. A backend has the same colour and marker in every figure; the colours are
those of Okabe and Ito (Color Universal Design, 2008) and Paul Tol's muted scheme, which people
with colour-blindness can tell apart.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, DrawingArea
from matplotlib.transforms import offset_copy

from harness.cases import format as fmt
from harness.cases.columns import POINTS, caption_of, redundant_points
from harness.render.registries import FIGURES

COLOURS = {
    "naive": "#555555",
    "compiled": "#AA4499",
    "sdpa": "#88CCEE",
    "sdpa_math": "#DDCC77",
    "sdpa_flash": "#0072B2",
    "sdpa_efficient": "#56B4E9",
    "sdpa_cudnn": "#E69F00",
    "flex": "#009E73",
    "flash_triton": "#D55E00",
    "flash_attn_2": "#332288",
    "flash_attn_3": "#882255",
    "flash_attn_4": "#CC79A7",
    "flash_torch": "#999933",
    "auto": "#000000",
    "fp32": "#555555",
    "tf32": "#E69F00",
    "bf16": "#0072B2",
    "bf16_pure": "#56B4E9",
    "fp16": "#D55E00",
    "block": "#009E73",
    "model": "#0072B2",
}

SPLIT_COLOURS = {
    "ring": "#44AA99",
    "zigzag": "#6699CC",
    "striped": "#AA7744",
    "llama3": "#CC6677",
    "zigzag_llama3": "#117733",
    "context_parallel_torch": "#661100",
    "contiguous": "#44AA99",
}
"""Of schemes and layouts over several ranks, which no figure shows beside kernels."""

STRATEGY_COLOURS = {
    "ddp_naive": "#555555",
    "ddp_flat": "#E69F00",
    "ddp_overlapped": "#56B4E9",
    "ddp_bucketed": "#0072B2",
    "ddp_torch": "#D55E00",
    "sharded_optimizer": "#009E73",
    "zero_redundancy_torch": "#AA4499",
    "zero_1": "#DDCC77",
    "zero_2": "#999933",
    "fsdp": "#332288",
    "fsdp_torch": "#882255",
    "none": "#000000",
}
"""Of ways to train on several ranks, which no figure shows beside the others."""

DECODE_COLOURS = {
    "standard": "#000000",
    "flash_decode": "#D55E00",
    "flashinfer": "#009E73",
    "mla_materialised": "#999933",
    "mla_absorbed": "#AA4499",
    "flash_mla": "#0072B2",
    "mha": "#555555",
    "gqa": "#0072B2",
    "mqa": "#E69F00",
    "mla": "#AA4499",
}
"""Of what attends from a cache alone, beside libraries that have a colour already."""

MEMORY_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#009E73",
    "activations": "#E69F00",
    "temporaries": "#CC79A7",
    "communication": "#56B4E9",
    "other": "#999999",
}
"""Of what memory holds, from the bottom of a stack to its top."""

KERNEL_COLOURS = {
    "matmul": "#0072B2",
    "attention": "#E69F00",
    "softmax": "#D55E00",
    "normalisation": "#009E73",
    "elementwise": "#56B4E9",
    "reduction": "#CC79A7",
    "copy": "#DDCC77",
    "optimizer": "#882255",
    "communication": "#332288",
    "other": "#999999",
}
"""Of what kernels do, from the first in a bar to the last."""

_FALLBACK_COLOURS = ("#44AA99", "#CC6677", "#117733", "#661100", "#6699CC", "#888888")

_MARKERS = "osD^vPX<>p*hd8"

ON_BAR_LIGHT, ON_BAR_DARK = "#FFFFFE", "#000001"
"""Text on a coloured bar: not quite white and black, which a dark page would exchange."""

LEADER = "#BBBBBB"
"""Of what leads from a point to its label, which no data is drawn in."""

MARGIN_PT, SAMPLE_PT = 12, 22
"""From the axes to a sample of a line, and along the sample."""

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
    """What it shows, in one sentence computed from its data."""


figure = FIGURES.register


def build_figure(name: str, frame: pd.DataFrame) -> CaptionedFigure | None:
    """The figure ``name`` over the frame; None where the frame has nothing for it."""
    if frame.empty:
        return None
    with mpl.rc_context(STYLE):
        built: CaptionedFigure | None = FIGURES[name].target(frame)
        if built is not None:
            built.name = name
            wrap_titles(built.figure)
    return built


_LEAST_LETTER = 0.4
"""Mean width of letters, in units of their size, that no title stays below."""


def wrap_titles(drawing: Figure) -> None:
    """Break titles that would reach into the panel beside theirs, or out of the figure."""
    wide = [axes for axes in drawing.axes if _may_be_too_wide(drawing, axes)]
    if not wide:
        return
    drawing.draw_without_rendering()
    for axes in wide:
        left, right = _column_of(drawing, axes)
        extent = axes.title.get_window_extent()
        centre = (extent.x0 + extent.x1) / 2
        room = 2 * min(centre - left, right - centre)
        text = axes.get_title()
        if extent.width > room > 0:
            axes.title.set_text(fill(text, max(12, int(len(text) * room / extent.width))))


def _may_be_too_wide(drawing: Figure, axes: Axes) -> bool:
    if axes.get_subplotspec() is None or "\n" in axes.get_title():
        return False
    left, right = _column_of(drawing, axes)
    letter = _LEAST_LETTER * float(axes.title.get_fontsize()) * drawing.dpi / 72
    return len(axes.get_title()) * letter > (right - left) / 2


def _column_of(drawing: Figure, axes: Axes) -> tuple[float, float]:
    """From where to where the panel's column of the figure goes, in pixels."""
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
"""What would differ from one run or library to the next, left out."""


def save(built: CaptionedFigure, format: str, **style: Any) -> bytes:
    """The figure as ``png``, ``svg`` or ``pdf``; the bytes depend on the figure alone."""
    data = io.BytesIO()
    with mpl.rc_context(STYLE | style):
        built.figure.savefig(data, format=format, metadata=_METADATA[format])
    return data.getvalue()


def draw(name: str, frame: pd.DataFrame) -> tuple[str, bytes, bytes] | None:
    """Caption, PNG and SVG of the figure ``name``; None where the frame has nothing for it."""
    built = build_figure(name, frame)
    return None if built is None else (built.caption, save(built, "png"), save(built, "svg"))


def colour(name: str) -> str:
    """The colour of a backend, a precision or another choice, the same everywhere."""
    kinds = (COLOURS, SPLIT_COLOURS, STRATEGY_COLOURS, DECODE_COLOURS)
    known = next((kind[name] for kind in kinds if name in kind), None)
    return known or _FALLBACK_COLOURS[_digest(name) % len(_FALLBACK_COLOURS)]


def marker(name: str) -> str:
    """The marker of a backend or a strategy, so that lines differ by more than colour."""
    kinds = (SPLIT_COLOURS, STRATEGY_COLOURS, DECODE_COLOURS)
    names = list(next((kind for kind in kinds if name in kind), COLOURS))
    place = names.index(name) if name in names else _digest(name)
    return _MARKERS[place % len(_MARKERS)]


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def panel_key(rows: pd.DataFrame, across: Iterable[str]) -> tuple[list[str], str]:
    """Point columns that vary beyond ``across``, and the sentence on those that do not."""
    ignored = {*across, "memory_source", "device"} | redundant_points(rows)
    names = [name for name in POINTS if name not in ignored]
    names = [name for name in names if name in rows]
    varying = [name for name in names if POINTS[name].varies(rows[name])]
    return varying, caption_of(rows, [name for name in names if name not in varying])


def describe(row: pd.Series, names: Iterable[str]) -> str:
    """The values of ``names`` in a row, in words."""
    words = (POINTS[name].describe(row[name]) for name in names if row[name] == row[name])
    return ", ".join(word for word in words if word)


def mixed_with_white(tint: str, share: float) -> tuple[float, ...]:
    """A lighter ``tint``: opaque, so that the grid does not shine through."""
    return tuple(1 - share * (1 - channel) for channel in to_rgb(tint))


def label_line_ends(axes: Axes, lines: list[Line2D], height_in: float) -> None:
    """Write each line's label into the right margin, behind a sample of the line.

    Labels stand as high as their lines end, moved apart until none overlap. A pale line leads
    there from each line that runs as far as any other; one that ends early is known by its
    sample, since what crosses the plot where it has no data would look like data.

    Args:
        lines: drawn lines that have labels, on axes whose limits are final.
        height_in: height of the axes in inches, to know how tall a letter is.
    """
    bottom, top = (axes.transData.transform((1, y))[1] for y in axes.get_ylim())
    gap = (top - bottom) * 0.14 / height_in
    lines = sorted(lines, key=lambda line: (_end(line)[1], str(line.get_label())))
    last = max((_end(line)[0] for line in lines), default=0.0)
    heights = _spread([axes.transData.transform(_end(line))[1] for line in lines], gap)
    # Not so low that a label touches the number of the last tick.
    heights = _below(top, _above(bottom + gap / 2, heights, gap), gap)
    for line, height in zip(lines, heights, strict=True):
        beside = axes.transData.inverted().transform((0, height))[1]
        _write_label(axes, line, beside, led=_end(line)[0] == last)


def _end(line: Line2D) -> tuple[float, float]:
    x, y = np.asarray(line.get_data(), dtype=float)[:, -1]
    return float(x), float(y)


def _write_label(axes: Axes, line: Line2D, beside: float, *, led: bool) -> None:
    """A sample of the line and its label, in the margin at the height ``beside``."""
    margin = axes.get_yaxis_transform()
    sample = DrawingArea(SAMPLE_PT, 8)
    sample.add_artist(
        Line2D(
            [0, SAMPLE_PT / 2, SAMPLE_PT],
            [4, 4, 4],
            color=line.get_color(),
            linestyle=line.get_linestyle(),
            linewidth=line.get_linewidth(),
            marker=line.get_marker(),
            markevery=[1],
            markeredgecolor=line.get_markeredgecolor(),
            markeredgewidth=line.get_markeredgewidth(),
        )
    )
    leader = {"arrowstyle": "-", "color": LEADER, "linewidth": 0.7, "relpos": (0, 0.5)}
    axes.add_artist(
        AnnotationBbox(
            sample,
            _end(line),
            xybox=(1, beside),
            boxcoords=offset_copy(margin, axes.get_figure(root=True), x=MARGIN_PT, units="points"),
            box_alignment=(0, 0.5),
            frameon=False,
            pad=0,
            annotation_clip=False,
            arrowprops={**leader, "shrinkA": 1, "shrinkB": 3} if led else None,
            zorder=1,
        )
    )
    axes.annotate(
        str(line.get_label()),
        (1, beside),
        xycoords=margin,
        xytext=(MARGIN_PT + SAMPLE_PT + 4, 0),
        textcoords="offset points",
        color=line.get_color(),
        fontsize=8,
        va="center",
        annotation_clip=False,
    )


def draw_spread(
    axes: Axes, x: pd.Series, low: pd.Series, high: pd.Series, tint: str, *, upright: bool = True
) -> None:
    """A thin bar from ``low`` to ``high`` at each ``x`` (or at each y, lying)."""
    known = low.notna() & high.notna()
    draw = axes.vlines if upright else axes.hlines
    draw(x[known], low[known], high[known], color=tint, linewidth=2.6, alpha=0.45)


def mark_out_of_memory(axes: Axes, crosses: Iterable[tuple[float, str]]) -> None:
    """A cross for each (x, name) in the name's colour, side by side just above the frame.

    A name that has no line to be written at is written beside its cross.
    """
    drawn = {line.get_label() for line in axes.get_lines()}
    by_x: dict[float, list[str]] = {}
    for x, name in dict.fromkeys(crosses):
        by_x.setdefault(x, []).append(name)
    for x, names in by_x.items():
        for place, name in enumerate(names):
            known = any(str(label).startswith(name) for label in drawn)
            axes.annotate(
                fmt.TIMES if known else f"{fmt.TIMES} {name}",
                (x, 1.0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(7 * (place - (len(names) - 1) / 2), 4),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=11 if known else 7,
                fontweight="bold",
                color=colour(name),
            )


def _spread(heights: list[float], gap: float) -> list[float]:
    """Ascending heights moved apart to at least ``gap``, each cluster about its own middle."""
    clusters: list[list[float]] = []
    for height in heights:
        clusters.append([height])
        while len(clusters) > 1 and _overlap(clusters[-2], clusters[-1], gap):
            last = clusters.pop()
            clusters[-1] += last
    return [
        sum(cluster) / len(cluster) + (place - (len(cluster) - 1) / 2) * gap
        for cluster in clusters
        for place in range(len(cluster))
    ]


def _below(top: float, heights: list[float], gap: float) -> list[float]:
    """Heights, apart by ``gap``, moved down as far as it takes for none to be above ``top``."""
    found: list[float] = []
    for height in reversed(heights):
        top = min(top, height)
        found.append(top)
        top -= gap
    return found[::-1]


def _above(bottom: float, heights: list[float], gap: float) -> list[float]:
    """Heights, apart by ``gap``, moved up as far as it takes for none to be below ``bottom``."""
    return [-height for height in _below(-bottom, [-height for height in heights[::-1]], gap)][::-1]


def _overlap(below: list[float], above: list[float], gap: float) -> bool:
    distance = sum(above) / len(above) - sum(below) / len(below)
    return distance < gap * (len(below) + len(above)) / 2
