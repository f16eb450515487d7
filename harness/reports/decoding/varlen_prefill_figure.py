"""Tokens per second of prefilling, packed and padded."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.drawing.bars import draw_bars
from harness.drawing.marked import SIGNS, say_marked
from harness.drawing.panels import panels
from harness.render.figure import CaptionedFigure, figure
from harness.render.palette import colour
from harness.reports.decoding.varlen_prefill import prefilled
from harness.sentences.findings import by_name, sentence, span

CAPTION = "Tokens of prompts prefilled per second, padding not counted."


@figure("varlen_prefill")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = prefilled(frame)
    if rows.empty or rows["prefill_tokens_per_s"].isna().all():
        return None
    rows = rows[rows["status"] != "unsupported"]
    kinds = ["layout", "attention", "cache"]
    across = [*kinds, "kv_len", "warmup_steps", "measure_steps"]
    bars = len(rows.drop_duplicates(kinds))
    name_cache = rows["cache"].nunique() > 1
    drawing, drawn, common = panels(
        rows, across, width_in=5.0 + 0.7 * name_cache, height_in=1.0 + 0.28 * bars
    )
    for axis, group in drawn:
        group = group.sort_values(kinds, kind="stable")
        names = [_name(row, name_cache) for _, row in group.iterrows()]
        tints = [colour(str(name)) for name in group["attention"]]
        words = [fmt.STATUS_WORDS.get(status, fmt.ABSENT) for status in group["status"]]
        rates = list(group["prefill_tokens_per_s"])
        draw_bars(axis, names, rates, tints, words=words, marks=list(group["mark"]))
        axis.set_xlabel("tokens/s")
    by_backend = rows.groupby("attention")["prefill_tokens_per_s"]
    found = [(span(part, fmt.number), str(name)) for name, part in by_backend if part.notna().any()]
    return CaptionedFigure(
        caption=f"{CAPTION} {say_marked(rows['mark'], SIGNS)} {common}".strip(),
        figure=drawing,
        finding=sentence(f"over their layouts, prompts are read at {by_name(found, 'tokens/s')}"),
    )


def _name(row: pd.Series, name_cache: bool) -> str:
    words = [row["attention"], row["layout"], *([row["cache"]] if name_cache else [])]
    return ", ".join(str(word) for word in words)
