"""How the time of attention grows with the window, by backend."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.cases import format as fmt
from harness.cases.columns import NO_MASK, sorted_values
from harness.drawing.line_labels import draw_spread, label_line_ends, mark_out_of_memory
from harness.drawing.marked import BAR_WORDS, draw_hollow, say_marked
from harness.drawing.panels import log_ticks_of, panels, whole_calls
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour, marker
from harness.render.rows import marks_of
from harness.sentences.findings import say_out_of_memory, sentence, span

CAPTION = (
    "Median time of attention, forward and backward together unless the mode is forward, over the "
    "length of its window, both axes logarithmic; rightmost, without a window, all keys are seen. "
    f"With a bar for times {BAR_WORDS}; a cross above the frame marks where memory ran out."
)

WIDTH_IN, HEIGHT_IN = 4.8, 2.9


@figure("time_over_window")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = whole_calls(frame)
    rows = rows.assign(mark=marks_of(rows))
    if rows["window"].nunique() < 2 or rows["median_ms"].isna().all():
        return None
    # Where nothing hides a key a window would have to be as long as the keys are many.
    reach = rows["kv_len"].where(rows["window"] == NO_MASK, rows["window"]).astype(float)
    rows = rows.assign(reach=reach)
    across = ["attention", "window"]
    figure, drawn, common = panels(rows, across, width_in=WIDTH_IN, height_in=HEIGHT_IN)
    for axis, group in drawn:
        lines = _draw(axis, group)
        label_line_ends(axis, lines, HEIGHT_IN - 0.9)
    said = say_marked(pd.concat([group["mark"] for _, group in drawn]))
    return CaptionedFigure(
        caption=f"{CAPTION} {said} {common}".strip(),
        figure=figure,
        finding=sentence(_say_saved(rows), say_out_of_memory(rows)),
    )


def _say_saved(rows: pd.DataFrame) -> str | None:
    """What the shortest window takes of the time without one, by backend and point."""
    names = ["attention", "num_heads", "num_kv_heads", "head_dim", "seq_len", "softcap", "sinks"]
    shares = []
    for _, part in rows[rows["median_ms"].notna()].groupby(names, dropna=False):
        whole = part[part["window"] == NO_MASK]
        if len(whole) and part["window"].nunique() > 1:
            shortest = part.sort_values("reach").iloc[0]
            shares.append(whole.iloc[0]["median_ms"] / shortest["median_ms"])
    return f"the shortest window is {span(shares)} as fast as none" if shares else None


def _draw(axis: Axes, rows: pd.DataFrame) -> list[Line2D]:
    """Draw a panel but for its labels; returns its lines."""
    lengths = sorted(rows["reach"].unique())
    unlimited = set(rows.loc[rows["window"] == NO_MASK, "reach"])
    crosses: list[tuple[float, str]] = []
    lines: list[Line2D] = []
    for name in sorted_values(rows, "attention"):
        mine = rows[rows["attention"] == name].sort_values("reach", kind="stable")
        crosses += [(length, name) for length in mine.loc[mine["status"] == "oom", "reach"]]
        shown = mine[mine["median_ms"].notna()]
        if shown.empty:
            continue
        tint, x, y = colour(name), shown["reach"], shown["median_ms"]
        draw_spread(axis, x, shown["low_ms"], shown["high_ms"], tint)
        lines += axis.plot(x, y, color=tint, marker=marker(name), label=name)
        draw_hollow(axis, x, y, shown["mark"], tint, marker(name))

    def in_words(length: float, _: int) -> str:
        return NO_MASK if length in unlimited else fmt.integer(length)

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(in_words))
    axis.set_xlabel("window (keys)")
    axis.set_ylabel("median time (ms)")
    mark_out_of_memory(axis, crosses)
    log_ticks_of(axis.yaxis, axis.get_ylim())
    return lines
