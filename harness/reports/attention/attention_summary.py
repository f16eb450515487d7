"""Attention alone: which backend is fastest at which shape, and what it needs in memory."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import POINTS
from harness.render.rows import of_task, per_case, speedup_column, speedup_over, verdict_over
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import say_out_of_memory, say_over, sentence
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Attention alone: median times, achieved rates by the FLOP formula, peak memory, and the "
    "largest relative error against float64"
)
SPEEDUP = "; speed-up over naive attention at the same point"


@table("attention_summary", default=20)
def build(frame: pd.DataFrame) -> Table | None:
    calls = of_task(frame, "attention")
    if calls.empty:
        return None
    rows = per_case(
        calls,
        phases=("forward", "backward", "forward_backward"),
        values=("median_ms", "tflops"),
    )
    naive = rows["attention"] == POINTS["attention"].baseline
    both = speedup_over(rows, "forward_backward_median_ms", ["attention"], naive)
    rows["speedup"] = both.fillna(speedup_over(rows, "forward_median_ms", ["attention"], naive))
    has_both = rows["forward_backward_median_ms"].notna()
    rows["both_evidence"] = rows["forward_backward_evidence"].where(
        has_both, rows["forward_evidence"]
    )
    rows["verdict"] = verdict_over(rows, "both_evidence", ["attention"], naive)
    rows.loc[rows["status"] != "ok", "check_error"] = float("nan")
    return make_table(
        caption=f"{CAPTION}{SPEEDUP if rows['speedup'].notna().any() else ''}.",
        rows=rows,
        lead=["head_dim", "seq_len", "attention"],
        keep=["attention"],
        order=["num_heads", "batch_size", "precision", "head_dim", "seq_len", "attention"],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            time_column("forward_backward", "both (ms)"),
            Column(
                key="forward_tflops", header="forward (TFLOP/s)", format=fmt.number, detail=True
            ),
            Column(
                key="backward_tflops", header="backward (TFLOP/s)", format=fmt.number, detail=True
            ),
            Column(
                key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number, detail=True
            ),
            Column(key="check_error", header="error", format=fmt.scientific, detail=True),
            speedup_column(rows, naive),
        ],
    )


@finding("attention_summary")
def say(rows: pd.DataFrame) -> str | None:
    both = rows["forward_backward_median_ms"].fillna(rows["forward_median_ms"])
    return sentence(
        say_fastest(rows.assign(both=both), "both", evidence="both_evidence"),
        say_over(rows, "speedup", "verdict", "naive", evidence="both_evidence"),
        say_out_of_memory(rows),
    )
