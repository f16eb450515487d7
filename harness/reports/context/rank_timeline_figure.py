"""Timelines of every rank: computing, waiting for keys, and waiting for gradients."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.cases import format as fmt
from harness.render.figure import ON_BAR_DARK, ON_BAR_LIGHT, CaptionedFigure, figure
from harness.render.palette import WAITING, colour, mixed_with_white
from harness.reports.context.split_panels import ACROSS, calls_by_panel
from harness.reports.context.split_rows import COMPUTE
from harness.sentences.findings import by_name, percent_span, sentence

MAX_BARS = 48
"""Ranks times schemes; beyond it one transport of each scheme is shown."""

BAR = 0.76


CAPTION = (
    "One traced pass on every rank, forward (dark) then backward (light), each span of computing "
    "numbered by its step where it is wide enough; waiting for other ranks in orange; white is "
    "everything else, such as copies and the host."
)


@figure("rank_timeline")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    panels, _ = calls_by_panel(frame, tuple(name for name in ACROSS if name != "seq_len"))
    if not panels:
        return None
    # The longest sequence on most ranks, where the structure shows best.
    rows = pd.concat([rows for _, rows in panels])
    rows = rows[rows["compute_ms"].notna()]
    if rows.empty:
        return None
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    rows = rows[rows["seq_len"] == rows["seq_len"].max()]
    rows = rows[rows["kernel"] == rows["kernel"].iloc[0]]
    num_ranks = int(rows["world_size"].iloc[0])
    if len(rows) * num_ranks > MAX_BARS:
        # The fastest of each, in the usual order.
        fastest = rows.sort_values("whole_ms", kind="stable").drop_duplicates("scheme").index
        rows = rows.loc[rows.index.isin(fastest)]
    height = 0.45 + 0.2 * num_ranks
    drawing = Figure(figsize=(7.6, height * len(rows) + 0.9), layout="constrained")
    axes = drawing.subplots(len(rows), 1, squeeze=False, sharex=True).ravel()
    for axis, (_, row) in zip(axes, rows.iterrows(), strict=True):
        _draw(axis, row)
    axes[0].set_xlim(0, 1.01 * max(map(_end, rows["timeline"])))
    axes[-1].set_xlabel("time (ms)")
    _legend(drawing)
    first = rows.iloc[0]
    words = f"{num_ranks} ranks, {fmt.integer(first['seq_len'])} tokens, kernel {first['kernel']}."
    return CaptionedFigure(caption=f"{CAPTION} {words}", figure=drawing, finding=_finding(rows))


def _finding(rows: pd.DataFrame) -> str:
    shares = rows["exposed_ms"] / rows["whole_ms"]
    order = shares.groupby(rows["scheme"]).median().sort_values().index
    by_scheme = dict(list(shares.groupby(rows["scheme"])))
    words = [(percent_span(by_scheme[name]), str(name)) for name in order]
    shown = by_name(words, "of its time")
    return sentence(f"in traced passes the busiest rank waits for others in {shown}")


def _draw(axis: Axes, row: pd.Series) -> None:
    tint = colour(row["scheme"])
    ranks = row["timeline"][_typical(row["timeline"])]
    end = _end(row["timeline"])
    for index, rank in enumerate(ranks):
        for phase, kind, step, start, stop in rank["spans"]:
            if kind == COMPUTE:
                face: Any = mixed_with_white(tint, 1.0 if phase == "forward" else 0.55)
            else:
                face = WAITING
            what = f"rank {index}, {phase} step {step}, {kind}"
            axis.barh(index, stop - start, BAR, left=start, color=face, linewidth=0, label=what)
            if kind == COMPUTE and stop - start > 0.025 * end:
                axis.text(
                    (start + stop) / 2,
                    index,
                    str(step),
                    ha="center",
                    va="center",
                    fontsize=6,
                    color=ON_BAR_LIGHT if phase == "forward" else ON_BAR_DARK,
                )
    axis.set_title(f"{row['scheme']}, {row['transport']}", loc="left", fontsize=8, pad=3)
    axis.set_yticks(range(len(ranks)), [f"rank {index}" for index in range(len(ranks))])
    axis.tick_params(axis="y", labelsize=7, length=0)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


def _typical(passes: list[list[dict[str, Any]]]) -> int:
    """The traced pass of median length."""
    return sorted(range(len(passes)), key=lambda index: _end_of(passes[index]))[len(passes) // 2]


def _end(passes: list[list[dict[str, Any]]]) -> float:
    """When the typical pass ends."""
    return _end_of(passes[_typical(passes)])


def _end_of(ranks: list[dict[str, Any]]) -> float:
    return max(float(span[4]) for rank in ranks for span in rank["spans"])


def _legend(drawing: Figure) -> None:
    handles = [
        Patch(color=mixed_with_white("#555555", 1.0), label="computing, forward"),
        Patch(color=mixed_with_white("#555555", 0.55), label="computing, backward"),
        Patch(color=WAITING, label="waiting for other ranks"),
    ]
    drawing.legend(handles=handles, loc="outside upper center", ncols=3)
