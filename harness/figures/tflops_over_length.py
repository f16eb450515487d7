"""The rate that attention reaches as the sequence grows, by backend."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness import format as fmt
from harness.figure import CaptionedFigure, colour, figure, marker
from harness.figures._panels import panels, whole_calls
from harness.points import attention_rank

CAPTION = (
    "Achieved rate of attention, forward and backward together unless the mode is forward, by the "
    "FLOP formula over the median time; a cross above the frame marks where memory ran out."
)

WIDTH_IN, HEIGHT_IN = 4.4, 2.9


@figure("tflops_over_length")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = whole_calls(frame)
    if rows["seq_len"].nunique() < 2 or rows["tflops"].isna().all():
        return None
    across = ["attention", "seq_len", "kv_len"]
    figure, drawn, common = panels(
        rows, across, width_in=WIDTH_IN, height_in=HEIGHT_IN, legend=True
    )
    for axis, group in drawn:
        _draw(axis, group)
    return CaptionedFigure(caption=f"{CAPTION} {common}".strip(), figure=figure)


def _draw(axis: Axes, rows: pd.DataFrame) -> None:
    lengths = sorted(rows["seq_len"].unique())
    crosses: dict[int, list[str]] = {}
    for name in sorted(rows["attention"].unique(), key=attention_rank):
        mine = rows[rows["attention"] == name].sort_values("seq_len", kind="stable")
        shown = mine[mine["tflops"].notna()]
        axis.plot(shown["seq_len"], shown["tflops"], color=colour(name), marker=marker(name))
        for seq_len in mine.loc[mine["status"] == "oom", "seq_len"]:
            crosses.setdefault(seq_len, []).append(name)
    axis.set_xscale("log", base=2)
    axis.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: fmt.integer(length)))
    axis.tick_params(axis="x", labelrotation=30 if len(lengths) > 5 else 0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sequence length (tokens)")
    axis.set_ylabel("TFLOP/s")
    for seq_len, names in crosses.items():
        _mark_out_of_memory(axis, seq_len, names)


def _mark_out_of_memory(axis: Axes, seq_len: float, names: list[str]) -> None:
    """Crosses side by side just above the frame, where no line runs."""
    for place, name in enumerate(names):
        axis.annotate(
            fmt.TIMES,
            (seq_len, 1.0),
            xycoords=axis.get_xaxis_transform(),
            xytext=(7 * (place - (len(names) - 1) / 2), 4),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=11,
            fontweight="bold",
            color=colour(name),
        )
