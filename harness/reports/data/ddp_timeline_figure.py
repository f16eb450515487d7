"""Timelines of computing and communication on every rank, by strategy."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.bench.intervals import Interval, clipped, union
from harness.cases import format as fmt
from harness.cases.columns import sort_by_points
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import WAITING, mixed_with_white
from harness.reports.data.step_rows import COMPUTE, lanes, on_ranks
from harness.sentences.findings import by_name, percent_span, sentence
from parallel import STRATEGIES

CAPTION = (
    "One training step on every rank, from a profiler's trace: above computing (forward dark, "
    "backward lighter, optimizer palest), below communication, dark where nothing is computed "
    "meanwhile and pale where it hides. Exposed is the share of the step in which a rank "
    "communicates without computing, from the least to the most exposed rank; the time of "
    "communication and what of it hides are those of the busiest rank, which computes longest."
)
WAITS = "NCCL's kernels include waiting for ranks that come late."

TINT = "#0072B2"
SHADES = {"forward": 1.0, "backward": 0.62, "optimizer": 0.32}
HIDDEN = mixed_with_white(WAITING, 0.38)

MAX_PANELS = 12
MAX_RANKS = 4

LANE_IN = 0.17

TITLE_WIDTH = 112
"""Characters of a title in one line."""


@figure("ddp_timeline")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = on_ranks(frame)
    if rows.empty:
        return None
    rows = rows[(rows["status"] == "ok") & rows["traced_ms"].notna()]
    if rows.empty:
        return None
    # Most ranks, where there is most to see, and the first of the other points.
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    for name in ("model", "seq_len", "batch_size", "precision"):
        rows = rows[rows[name] == sort_by_points(rows, [name])[name].iloc[0]]
    rows = rows.assign(place=[_place(name) for name in rows["strategy"]])
    rows = rows.sort_values(["place", "bucket_mib"], kind="stable")
    left_out = [_title(row).split(":")[0] for _, row in rows.iloc[MAX_PANELS:].iterrows()]
    rows = rows.head(MAX_PANELS)
    num_ranks = min(MAX_RANKS, int(rows["world_size"].iloc[0]))
    height = 2 * LANE_IN * num_ranks + 0.42
    drawing = Figure(figsize=(7.6, height * len(rows) + 0.9), layout="constrained")
    axes = drawing.subplots(len(rows), 1, squeeze=False, sharex=True).ravel()
    ends = [
        _draw(axis, row, num_ranks) for axis, (_, row) in zip(axes, rows.iterrows(), strict=True)
    ]
    axes[0].set_xlim(0, 1.005 * max(ends))
    axes[-1].set_xlabel("time (ms)")
    _legend(drawing)
    first = rows.iloc[0]
    words = (
        f"{first['model']}, {first['precision']}, {int(first['world_size'])} ranks, "
        f"{int(first['batch_size'])} sequences of {fmt.integer(first['seq_len'])} tokens each."
    )
    words += f" Not shown: {', '.join(left_out)}." if left_out else ""
    waits = WAITS if (rows["device"] == "cuda").all() else ""
    return CaptionedFigure(
        caption=" ".join(filter(None, (CAPTION, waits, words))),
        figure=drawing,
        finding=_finding(rows),
    )


def _finding(rows: pd.DataFrame) -> str:
    known = rows[rows["hidden_share"].notna() & ~rows["traced_impossible"].map(bool).astype(bool)]
    if known.empty:
        return sentence("no communication was traced")
    shares = known.groupby("strategy", sort=False)["hidden_share"]
    words = [(percent_span(part), str(name)) for name, part in shares]
    return sentence(f"hidden behind computing is {by_name(words, 'of the traced communication')}")


def _place(strategy: str) -> tuple[int, str]:
    """Each behind the one that it improves on; those of no such row follow by name."""
    name = strategy.split("(")[0]
    earlier = {entry.name: entry.target.improves_on for entry in STRATEGIES}
    if name not in earlier or (earlier[name] is None and name not in earlier.values()):
        return len(earlier), name
    place, step = 0, earlier[name]
    while step is not None:
        place, step = place + 1, earlier[step]
    return place, name


def _draw(axis: Axes, row: pd.Series, num_ranks: int) -> float:
    """The panel of one case; returns when its last rank ends."""
    ranks = row["timeline"][0][:num_ranks]
    zero = min(span[3] for rank in ranks for span in rank["spans"])
    end = 0.0
    for index, rank in enumerate(ranks):
        spans = [[*span[:3], span[3] - zero, span[4] - zero] for span in rank["spans"]]
        end = max(end, *(span[4] for span in spans))
        _draw_rank(axis, spans, 2 * index)
    axis.set_title(fill(_title(row), TITLE_WIDTH), loc="left", fontsize=8, pad=3)
    axis.set_yticks([2 * index + 0.4 for index in range(num_ranks)])
    axis.set_yticklabels([f"rank {index}" for index in range(num_ranks)])
    axis.tick_params(axis="y", labelsize=7, length=0)
    axis.set_ylim(2 * num_ranks - 0.55, -0.65)
    axis.grid(axis="y", visible=False)
    return end


def _draw_rank(axis: Axes, spans: list[list[Any]], y: int) -> None:
    # Thousands of spans: as pixels they take a tenth of what they take as vectors.
    for phase, shade in SHADES.items():
        bars = [(s, e - s) for name, kind, _, s, e in spans if kind == COMPUTE and name == phase]
        axis.broken_barh(
            bars, (y - 0.42, 0.8), color=mixed_with_white(TINT, shade), linewidth=0, rasterized=True
        )
    computing, sending = lanes(spans)
    axis.broken_barh(_bars(sending), (y + 0.46, 0.8), color=WAITING, linewidth=0, rasterized=True)
    hidden = union(part for busy in computing for part in clipped(sending, *busy))
    axis.broken_barh(_bars(hidden), (y + 0.46, 0.8), color=HIDDEN, linewidth=0, rasterized=True)


def _bars(intervals: list[Interval]) -> list[tuple[float, float]]:
    return [(start, end - start) for start, end in intervals]


def _title(row: pd.Series) -> str:
    if row["traced_impossible"]:
        return (
            f"{row['strategy']}: {fmt.number(row['traced_ms'])} ms of communication under the "
            "profiler, more than a step without it: no shares"
        )
    busiest = f"busiest rank: {fmt.number(row['traced_ms'])} ms"
    if fmt.is_missing(row["hidden_share"]):
        return f"{row['strategy']}, {busiest} of communication"
    return (
        f"{row['strategy']}: {row['exposed_ranks']}% of the step exposed; {busiest}, "
        f"{fmt.percent(row['hidden_share'])}% hidden"
    )


def _legend(drawing: Figure) -> None:
    handles = [
        Patch(color=mixed_with_white(TINT, shade), label=phase) for phase, shade in SHADES.items()
    ]
    handles += [
        Patch(color=WAITING, label="communication, exposed"),
        Patch(color=HIDDEN, label="communication, hidden"),
    ]
    drawing.legend(handles=handles, loc="outside upper center", ncols=5)
