"""The rate that attention reaches as the sequence grows, by backend."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.cases.columns import sorted_values
from harness.drawing.line_labels import draw_spread, label_line_ends, mark_out_of_memory
from harness.drawing.marked import BAR_WORDS, draw_hollow, say_marked
from harness.drawing.panels import panels, whole_calls
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour, marker
from harness.render.rows import marks_of
from harness.sentences.findings import say_out_of_memory, sentence, span
from harness.sentences.leaders import say_over_length

CAPTION = (
    "Achieved rate of attention, forward and backward together unless the mode is forward, by the "
    f"FLOP formula over the median time, with a bar for times {BAR_WORDS}; a cross above the frame "
    "marks where memory ran out."
)

WIDTH_IN, HEIGHT_IN = 4.8, 2.9


@figure("tflops_over_length")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = whole_calls(frame)
    rows = rows.assign(mark=marks_of(rows))
    if rows["seq_len"].nunique() < 2 or rows["tflops"].isna().all():
        return None
    across = ["attention", "seq_len", "kv_len"]
    # Shared in columns, which are precisions: float32 has a fraction of bfloat16's rate.
    figure, drawn, common = panels(
        rows, across, width_in=WIDTH_IN, height_in=HEIGHT_IN, share_y="col"
    )
    lines = [_draw(axis, group) for axis, group in drawn]
    # Labels stand where lines end, and limits that panels share are final once all are drawn.
    for axis, _ in drawn:
        axis.set_ylim(bottom=0)
    for (axis, _), ends in zip(drawn, lines, strict=True):
        label_line_ends(axis, ends, HEIGHT_IN - 0.9)
    said = say_marked(pd.concat([group["mark"] for _, group in drawn]))
    return CaptionedFigure(
        caption=f"{CAPTION} {said} {common}".strip(),
        figure=figure,
        finding=sentence(
            say_over_length(rows, "tflops", highest=True),
            f"rates are {span(rows['tflops'], fmt.number)} TFLOP/s",
            say_out_of_memory(rows),
        ),
    )


def _draw(axis: Axes, rows: pd.DataFrame) -> list[Line2D]:
    """Draw a panel but for its labels; returns its lines."""
    lengths = sorted(rows["seq_len"].unique())
    crosses: list[tuple[float, str]] = []
    lines: list[Line2D] = []
    for name in sorted_values(rows, "attention"):
        mine = rows[rows["attention"] == name].sort_values("seq_len", kind="stable")
        shown = mine[mine["tflops"].notna()]
        crosses += [(length, name) for length in mine.loc[mine["status"] == "oom", "seq_len"]]
        if shown.empty:
            continue
        tint, x, y = colour(name), shown["seq_len"], shown["tflops"]
        low, high = (y * shown["median_ms"] / shown[quartile] for quartile in ("high_ms", "low_ms"))
        draw_spread(axis, x, low, high, tint)
        lines += axis.plot(x, y, color=tint, marker=marker(name), label=name)
        draw_hollow(axis, x, y, shown["mark"], tint, marker(name))
    axis.set_xscale("log", base=2)
    axis.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: fmt.integer(length)))
    axis.tick_params(axis="x", labelrotation=30 if len(lengths) > 5 else 0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))
    axis.set_xlabel("sequence length (tokens)")
    axis.set_ylabel("TFLOP/s")
    mark_out_of_memory(axis, crosses)
    return lines
