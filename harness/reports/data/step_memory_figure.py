"""Memory of a rank under each strategy, counted and by formula."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.analysis.case_columns import GIB
from harness.cases import format as fmt
from harness.cases.columns import sort_by_points
from harness.render.figure import CaptionedFigure, describe, figure, panel_key
from harness.render.palette import mixed_with_white
from harness.reports.data.step_rows import UNUSED, footprint_of, on_ranks, rank_gib
from harness.sentences.findings import sentence

CAPTION = (
    "Memory of the fullest rank in the first training step, by what it holds: counted tensor by "
    "tensor (upper bar), and by formula (lower, pale). Activations are those held when the forward "
    "pass ends: what checkpointed blocks compute again comes and goes in the backward pass."
)

TINTS = {
    "parameters": ("#0072B2", "parameters"),
    "gradients": ("#E69F00", "gradients"),
    "optimizer_state": ("#009E73", "optimizer state"),
    "activations": ("#999999", "activations"),
}

FORMULA = {key: key for key in TINTS} | {"activations": "saved_activations"}
"""Where :class:`~harness.predictions.training.Footprint` has each."""

MAX_PANELS = 2


@figure("step_memory")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = on_ranks(frame)
    if rows.empty:
        return None
    rows = rows[rows["status"] == "ok"]
    has_notes = [rank_gib(memory, "parameters_bytes") > 0 for memory in rows["rank_memory"]]
    rows = rows[has_notes].reset_index(drop=True)
    if rows.empty:
        return None
    varying, common = panel_key(rows, ("strategy", *UNUSED))
    rows = sort_by_points(rows, [*varying, "strategy"])
    groups = list(rows.groupby(varying, dropna=False, sort=False)) if varying else [((), rows)]
    groups = groups[:MAX_PANELS]
    most = max(len(group) for _, group in groups)
    drawing = Figure(figsize=(7.6, (0.5 * most + 0.75) * len(groups) + 0.5), layout="constrained")
    axes = drawing.subplots(len(groups), 1, squeeze=False).ravel()
    for axis, (_, group) in zip(axes, groups, strict=True):
        axis.set_title(describe(group.iloc[0], varying))
        for y, (_, row) in enumerate(group.iterrows()):
            counted = {key: rank_gib(row["rank_memory"], f"{key}_bytes") for key in TINTS}
            _bar(axis, y - 0.16, counted, 0.36, 1.0)
            total = sum(size for size in counted.values() if size == size)
            axis.annotate(
                fmt.number(total),
                (total, y - 0.16),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=7,
                va="center",
            )
            found = footprint_of(row["case"])
            if found is not None:
                formula = {key: getattr(found, field) / GIB for key, field in FORMULA.items()}
                _bar(axis, y + 0.2, formula, 0.2, 0.45)
        axis.set_yticks(range(len(group)), group["strategy"])
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.08)
    axes[-1].set_xlabel("memory (GiB)")
    handles = [Patch(color=tint, label=words) for tint, words in TINTS.values()]
    drawing.legend(handles=handles, loc="outside upper center", ncols=len(TINTS))
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(), figure=drawing, finding=_finding(rows)
    )


def _finding(rows: pd.DataFrame) -> str:
    held = [
        sum(size for key in TINTS if (size := rank_gib(memory, f"{key}_bytes")) == size)
        for memory in rows["rank_memory"]
    ]
    least, most = (choice(range(len(held)), key=held.__getitem__) for choice in (min, max))
    names = rows["strategy"].tolist()
    return sentence(
        f"{names[least]} holds least, {fmt.number(held[least])} GiB, and {names[most]} most, "
        f"{fmt.number(held[most])}"
    )


def _bar(axis: Axes, y: float, sizes: dict[str, float], height: float, share: float) -> None:
    left = 0.0
    for key, size in sizes.items():
        if size == size:
            face = mixed_with_white(TINTS[key][0], share)
            axis.barh(y, size, height, left=left, color=face, linewidth=0)
            left += size
