"""CS336 problem flash_benchmarking: latencies over head_dim, precision and length, by backend."""

from __future__ import annotations

import pandas as pd

from harness.render.rows import of_task, per_case
from harness.render.table import Table, finding, table
from harness.reports.attention.by_backend import table_by_backend
from harness.sentences.findings import from_wide, say_out_of_memory, sentence
from harness.sentences.leaders import say_over_length

CAPTION = (
    "Attention alone, by backend: median times of the forward pass / the backward pass / both "
    "passes together. Each median is taken by itself, so that where times scatter those of the two "
    "passes do not add up to that of both."
)

PHASES = ("forward", "backward", "forward_backward")


@table("flash_benchmarking")
def build(frame: pd.DataFrame) -> Table | None:
    calls = of_task(frame, "attention")
    if calls.empty:
        return None
    return table_by_backend(
        per_case(calls, phases=PHASES),
        caption=CAPTION,
        phases=PHASES,
        value="median_ms",
        unit="ms",
        lead=["head_dim", "precision", "seq_len"],
        keep=["seq_len"],
    )


@finding("flash_benchmarking")
def say(rows: pd.DataFrame) -> str | None:
    calls = from_wide(rows, "forward_backward_median_ms")
    if calls["value"].isna().all():
        calls = from_wide(rows, "forward_median_ms")
    return sentence(say_over_length(calls, "value"), say_out_of_memory(calls))
