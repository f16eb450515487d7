"""The ratios of a comparison as dots with their intervals, the most changed first."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from harness.render.figure import STYLE, CaptionedFigure, describe, panel_key
from harness.sentences.findings import sentence

TINTS = {
    "FASTER": "#0072B2",
    "LESS": "#0072B2",
    "SLOWER": "#D55E00",
    "MORE": "#D55E00",
    "SAME": "#777777",
    "UNCLEAR": "#CC79A7",
}
MARKS = {"FASTER": "^", "LESS": "^", "SLOWER": "v", "MORE": "v", "SAME": "o", "UNCLEAR": "s"}

MAX_ROWS = 40

UNNAMED = ("warmup_steps", "measure_steps", "seed")
"""Points that would only lengthen the names of cases; the table has them."""

CAPTION = (
    "Ratio of {a} over {b}, with its interval over rounds: to the right of 1 {b} is better. The "
    "band is what counts as the same{bound}."
)


def draw_comparison(
    rows: pd.DataFrame,
    names: tuple[str, str],
    bound: float | None,
    differing: Iterable[str] = (),
) -> CaptionedFigure | None:
    """A figure of the rows that ``attnbench-compare`` lists; None where none has a ratio.

    Args:
        differing: point columns in which the two sides differ, which no case has one value of.
    """
    rows = rows[rows["ratio"].notna()]
    if rows.empty:
        return None
    counts = rows["outcome"].value_counts()
    changed = np.log(rows["ratio"]).abs().sort_values(ascending=False, kind="stable").index
    total = len(rows)
    cut = f"the {MAX_ROWS} most changed of {total} cases" if total > MAX_ROWS else ""
    rows = rows.loc[changed[:MAX_ROWS]].sort_values("ratio", kind="stable")
    varying, common = panel_key(rows, (*UNNAMED, *differing))
    labels = [describe(row, varying) or str(row["attention"]) for _, row in rows.iterrows()]
    longest = max(map(len, labels))
    with mpl.rc_context(STYLE):
        drawing = Figure(
            figsize=(4.6 + 0.062 * longest, 1.1 + 0.24 * len(rows)), layout="constrained"
        )
        axes = drawing.subplots()
        same = float(rows["same_within"].iloc[0])
        axes.axvspan(1 - same, 1 + same, color="#DDDDDD", linewidth=0)
        axes.axvline(1, color="#444444", linewidth=1)
        if bound:
            axes.axvline(1 / (1 + bound / 100), color="#D55E00", linewidth=1, linestyle="--")
        for outcome, mine in rows.assign(line=range(len(rows))).groupby("outcome"):
            known = [(mine["ratio"] - mine["ratio_low"]), (mine["ratio_high"] - mine["ratio"])]
            axes.errorbar(
                mine["ratio"],
                mine["line"],
                xerr=[part.fillna(0).clip(lower=0) for part in known],
                linestyle="none",
                marker=MARKS[str(outcome)],
                color=TINTS[str(outcome)],
                label=f"{outcome} ({len(mine)}{f' of {counts[outcome]}' if cut else ''})",
            )
        axes.set_xscale("log")
        ends = [*rows["ratio_low"].dropna(), *rows["ratio_high"].dropna(), *rows["ratio"], 1.0]
        low, high = min(ends), max(ends)
        axes.set_xlim(low / (high / low) ** 0.06 / 1.01, high * (high / low) ** 0.06 * 1.01)
        few = high / low < 3
        locator = MaxNLocator(7, steps=[1, 2, 5, 10]) if few else LogLocator(base=2)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:.4g}"))
        if few:
            axes.tick_params(axis="x", labelrotation=30)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(-0.7, len(labels) - 0.3)
        axes.set_xlabel(f"ratio, {names[0]} over {names[1]}")
        axes.set_title(cut)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    words = ", and the dashed line is the bound" if bound else ""
    caption = CAPTION.format(a=names[0], b=names[1], bound=words)
    if cut:
        caption += f" Shown are {cut}."
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return CaptionedFigure(
        name="comparison",
        caption=f"{caption} {common}".strip(),
        figure=drawing,
        finding=sentence(f"of {total} cases {said}"),
    )
