"""Packed batches against dense ones of the same work: what variable lengths cost a backend."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import BATCH_LAYOUTS, point_groups
from harness.render.rows import apart_from_unsupported, of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import listed, percent_span, sentence

CAPTION = (
    "Dense batches, packed ones of equal lengths, and packed ragged ones with as many attended "
    "pairs as the dense one, in fewer tokens: median times, the rate of both passes by the FLOP "
    "formula over the real lengths, and that rate as a part of the dense batch's."
)

PHASES = ("forward", "backward", "forward_backward")


@table("packed")
def build(frame: pd.DataFrame) -> Table | None:
    calls = of_task(frame, "attention")
    if calls.empty:
        return None
    rows = per_case(calls, phases=PHASES, values=("median_ms", "tflops"))
    rows, footnotes = apart_from_unsupported(rows)
    rows["tflops"] = rows["forward_backward_tflops"].fillna(rows["forward_tflops"])
    group = point_groups(rows, ["layout"])
    dense = rows["layout"] == BATCH_LAYOUTS["none"]
    rates = rows[dense].groupby(group[dense])["tflops"].first()
    rows["of_dense"] = (rows["tflops"] / group.map(rates)).where(~dense)
    waits = rows[["forward_backward_host_bound", "forward_host_bound"]].bfill(axis=1).iloc[:, 0]
    rows["host_bound"] = waits
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["head_dim", "attention", "layout"],
        keep=["attention", "layout"],
        order=["num_heads", "precision", "head_dim", "seq_len", "attention", "layout"],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            time_column("forward_backward", "both (ms)"),
            Column(key="tflops", header="TFLOP/s", format=fmt.number),
            Column(key="of_dense", header="of dense (%)", format=fmt.percent),
        ],
    )
    built.footnotes += footnotes
    return built


@finding("packed")
def say(rows: pd.DataFrame) -> str | None:
    parts = []
    for layout, part in rows[rows["of_dense"].notna()].groupby("layout"):
        median = part.groupby("attention")["of_dense"].median().sort_values(ascending=False)
        words = [f"{percent_span([value])} with {name}" for name, value in median.items()]
        parts.append(f"{layout} batches reach {listed(words)} of the dense rate (median)")
    return sentence(*parts)
