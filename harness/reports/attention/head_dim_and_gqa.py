"""Rates over head_dim and grouped queries: where a backend has no kernel made for the shape."""

from __future__ import annotations

import pandas as pd

from harness.render.rows import of_task, per_case
from harness.render.table import Table, finding, table
from harness.reports.attention.by_backend import table_by_backend
from harness.sentences.findings import from_wide, sentence
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Attention alone, by backend: achieved rates of the forward pass / the backward pass, from "
    "median times and the FLOP formula. KV heads fewer than query heads are grouped queries (GQA), "
    "and value_dim below head_dim is that of latent attention."
)

PHASES = ("forward", "backward")


@table("head_dim_and_gqa")
def build(frame: pd.DataFrame) -> Table | None:
    calls = of_task(frame, "attention")
    if calls.empty:
        return None
    return table_by_backend(
        per_case(calls, phases=PHASES, values=("median_ms", "tflops")),
        caption=CAPTION,
        phases=PHASES,
        value="tflops",
        unit="TFLOP/s",
        lead=["head_dim", "value_dim", "num_kv_heads", "seq_len"],
        keep=["head_dim", "num_kv_heads"],
    )


@finding("head_dim_and_gqa")
def say(rows: pd.DataFrame) -> str | None:
    parts = []
    for phase in PHASES:
        calls = from_wide(rows, f"{phase}_tflops")
        found = say_fastest(calls, "value", highest=True) if len(calls) else None
        parts.append(f"in the {phase} pass {found}" if found else None)
    return sentence(*parts)
