"""The four mode combinations of zigzag_llama3: time, and memory as predicted and measured."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import point_groups
from harness.render.predicted_memory import predicted_columns
from harness.render.rows import verdict_over
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.context.split_rows import split_calls
from harness.sentences.findings import say_over, sentence
from harness.sentences.leaders import say_fastest

CAPTION = (
    "zigzag_llama3 on packed batches: two kernel calls, for a rank's early and its late chunks, or "
    "one fused call with the keys repeated that both see, in the forward and in the backward pass. "
    "Median times of the slowest rank; speed-up over two kernels in both; peak memory of the "
    "fullest rank as predicted and measured."
)


@table("zigzag_modes")
def build(frame: pd.DataFrame) -> Table | None:
    rows = split_calls(frame)
    if rows.empty or rows["modes"].isna().all():
        return None
    rows = rows[rows["modes"].notna()].reset_index(drop=True)
    group = point_groups(rows, ["attention", "modes"])
    usual = rows["modes"] == TWO_KERNELS
    base = rows.loc[usual].groupby(group[usual])["whole_ms"].first()
    rows["speedup"] = group.map(base) / rows["whole_ms"]
    rows["verdict"] = verdict_over(rows, "whole_evidence", ["attention", "modes"], usual)
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["world_size", "seq_len", "kernel", "transport", "modes"],
        keep=["modes"],
        without=["attention", "strategy", "scheme"],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            time_column("forward_backward", "both (ms)"),
            Column(key="speedup", header="speed-up", format=fmt.factor),
            *predicted_columns(rows, group=MEMORY),
            Column(key="peak_memory_gib", header="measured", format=fmt.number, group=MEMORY),
        ],
    )


@finding("zigzag_modes")
def say(rows: pd.DataFrame) -> str | None:
    return sentence(
        say_fastest(rows, "whole_ms", ("modes", "attention")),
        say_over(rows, "speedup", "verdict", TWO_KERNELS, "modes"),
    )


TWO_KERNELS = "two_kernels / two_kernels"

MEMORY = "peak memory (GiB)"
