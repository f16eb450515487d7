"""Measured copy bandwidth and matmul rate of the device, beside its datasheet."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import listed, sentence, span

CAPTION = (
    "Copy of a large tensor, bytes read and written over time, and one large square matmul, each "
    "in its fastest pass, since a roof is what can be reached; shares are of the datasheet's "
    "memory bandwidth and dense peak. The ridge is the arithmetic intensity at which a kernel "
    "could reach both."
)


@table("device_roof", default=200)
def build(frame: pd.DataFrame) -> Table | None:
    frame = of_task(frame, "roofline")
    if frame.empty:
        return None
    rows = per_case(
        frame, phases=("copy", "matmul"), values=("median_ms", "min_ms", "work_bytes", "work_flops")
    )
    rows["copy_gb_s"] = rows["copy_work_bytes"].astype(float) / rows["copy_min_ms"] / 1e6
    rows["matmul_tflops"] = rows["matmul_work_flops"].astype(float) / rows["matmul_min_ms"] / 1e9
    rows["copy_share"] = rows["copy_gb_s"] / rows["memory_bandwidth_gb_s"]
    rows["matmul_share"] = rows["matmul_tflops"] / rows["peak_tflops"]
    rows["ridge"] = 1e3 * rows["matmul_tflops"] / rows["copy_gb_s"]
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["precision"],
        keep=["precision"],
        without=("attention", "seq_len", "batch_size", "kv_len", "causal"),
        metrics=[
            Column(
                key="copy_gb_s",
                header="copy (GB/s)",
                format=fmt.number,
                status="copy_status",
                mark="copy_mark",
            ),
            Column(key="copy_share", header="of the datasheet (%)", format=fmt.percent),
            Column(
                key="matmul_tflops",
                header="matmul (TFLOP/s)",
                format=fmt.number,
                status="matmul_status",
                mark="matmul_mark",
            ),
            Column(key="matmul_share", header="of the peak (%)", format=fmt.percent),
            Column(key="ridge", header="ridge (FLOP/byte)", format=fmt.number),
        ],
    )


@finding("device_roof")
def say(rows: pd.DataFrame) -> str | None:
    if rows["matmul_tflops"].isna().all() or rows["copy_gb_s"].isna().all():
        return None
    rates = rows[rows["matmul_tflops"].notna()].groupby("precision")["matmul_tflops"]
    words = [f"{span(part, fmt.number)} TFLOP/s in {name}" for name, part in rates]
    return sentence(
        f"matmuls reach {listed(words)}", f"copies {span(rows['copy_gb_s'], fmt.number)} GB/s"
    )
