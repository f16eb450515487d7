"""The quickstart's answer: what a training step costs with each attention backend."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import POINTS
from harness.render.rows import of_task, per_case, speedup_column, speedup_over, verdict_over
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import say_out_of_memory, say_over, sentence
from harness.sentences.leaders import say_fastest

CAPTION = "Median time of the phases of a training step"
SPEEDUP = "; speed-up of the whole step over naive attention at the same point"


@table("summary", default=10)
def build(frame: pd.DataFrame) -> Table | None:
    steps = of_task(frame, "train_step")
    if steps.empty:
        return None
    rows = per_case(
        steps,
        phases=("forward", "backward", "optimizer", "step"),
        values=("median_ms", "tokens_per_s"),
    )
    naive = rows["attention"] == POINTS["attention"].baseline
    rows["speedup"] = speedup_over(rows, "step_median_ms", ["attention"], naive)
    rows["verdict"] = verdict_over(rows, "step_evidence", ["attention"], naive)
    return make_table(
        caption=f"{CAPTION}{SPEEDUP if rows['speedup'].notna().any() else ''}.",
        rows=rows,
        lead=["model", "attention"],
        keep=["attention"],
        order=["model", "mode", "precision", "batch_size", "seq_len", "attention"],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            time_column("optimizer", "optimizer (ms)", detail=True),
            time_column("step", "step (ms)"),
            Column(key="step_tokens_per_s", header="tokens/s", format=fmt.number, detail=True),
            Column(
                key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number, detail=True
            ),
            speedup_column(rows, naive),
        ],
    )


@finding("summary")
def say(rows: pd.DataFrame) -> str | None:
    return sentence(
        say_fastest(rows, "step_median_ms"),
        say_over(rows, "speedup", "verdict", "naive", evidence="step_evidence"),
        say_out_of_memory(rows),
    )
