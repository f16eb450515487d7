"""Tokens generated per second by the whole model, by attention and cache."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.drawing.bars import draw_bars
from harness.drawing.marked import SIGNS, say_marked
from harness.drawing.panels import panels
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour
from harness.reports.decoding.generate import UNUSED, generated
from harness.sentences.findings import by_name, sentence, span

CAPTION = "Tokens that the whole batch generates per second, by the median time of a step."


@figure("generate")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = generated(frame)
    if rows.empty or rows["decode_tokens_per_s"].isna().all():
        return None
    rows = rows[rows["status"] != "unsupported"]
    # A model with latents is of the same size and belongs beside the others.
    rows = rows.assign(variant=rows["model"])
    rows = rows.assign(model=[case["model"]["name"] for case in rows["case"]])
    kinds = ["attention", "cache", "lengths", "cuda_graph", "variant"]
    across = [*kinds, "seed", *UNUSED]
    several = rows["variant"].nunique() > rows["model"].nunique()
    across += ["model"] if several and rows["model"].nunique() == 1 else []
    # Where its cache tells the model, bars need not.
    told = several and (rows.groupby("cache")["variant"].nunique() == 1).all()
    differ = several and not told
    bars = len(rows.drop_duplicates(kinds))
    longest = max(len(_name(row, differ)) for _, row in rows.iterrows())
    width, height = 3.6 + 0.065 * longest, 1.0 + 0.28 * bars
    drawing, drawn, common = panels(rows, across, width_in=width, height_in=height)
    for axis, group in drawn:
        group = group.sort_values(kinds, kind="stable")
        names = [_name(row, differ) for _, row in group.iterrows()]
        tints = [colour(str(name)) for name in group["attention"]]
        words = [fmt.STATUS_WORDS.get(status, fmt.ABSENT) for status in group["status"]]
        draw_bars(
            axis,
            names,
            list(group["decode_tokens_per_s"]),
            tints,
            words=words,
            marks=list(group["mark"]),
        )
        axis.set_xlabel("generated tokens/s")
    if told:
        common = f"{_models(rows)} {common}"
    rates = rows.groupby("attention")["decode_tokens_per_s"]
    found = [(span(part, fmt.number), str(name)) for name, part in rates if part.notna().any()]
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(rows['mark'], SIGNS)} {common}".strip(),
        figure=drawing,
        finding=sentence(f"models generate {by_name(found, 'tokens/s')}"),
    )


def _models(rows: pd.DataFrame) -> str:
    """A sentence that names the caches of each model."""
    parts = [
        f"{variant} over {' and '.join(sorted(group['cache'].unique()))} caches"
        for variant, group in rows.groupby("variant", sort=True)
    ]
    return f"Models: {'; '.join(parts)}."


def _name(row: pd.Series, name_model: bool) -> str:
    words = [row["attention"], row["cache"]]
    words += [row["lengths"]] if row["lengths"] != "equal" else []
    words += ["graph"] if row["cuda_graph"] else []
    words += [row["variant"]] if name_model else []
    return ", ".join(str(word) for word in words)
