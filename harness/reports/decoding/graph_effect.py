"""Decoding steps launched kernel by kernel, and replayed as a CUDA graph."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import apart_from_unsupported, speedup_over, verdict_over
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.decoding.step_rows import UNUSED, decoded, operators_or_kernels
from harness.sentences.findings import percent_span, sentence, span, told

CAPTION = (
    "Decoding steps with and without a CUDA graph: time, the host's launches in a step, and the "
    "speed-up over the same step launched kernel by kernel. A replayed step sees the lengths that "
    "stand on the device; operators of PyTorch look at all places of the cache then, not only at "
    "those in use."
)


@table("graph_effect", default=90)
def build(frame: pd.DataFrame) -> Table | None:
    rows = decoded(frame)
    # Elsewhere it would repeat decode_latency.
    if rows.empty or not rows["cuda_graph"].any():
        return None
    rows, footnotes = apart_from_unsupported(rows)
    eager = ~rows["cuda_graph"].astype(bool)
    rows["speedup"] = speedup_over(rows, "decode_median_ms", ["cuda_graph"], eager)
    rows["verdict"] = verdict_over(rows, "decode_evidence", ["cuda_graph"], eager)
    rows["reason_words"] = rows["reason"].where(rows["status"] == "unsupported")
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["heads", "layers", "batch_size", "seq_len", "attention", "cuda_graph"],
        keep=["attention", "cuda_graph"],
        without=UNUSED,
        metrics=[
            Column(
                key="step_us",
                header="step (µs)",
                format=fmt.number,
                status="decode_status",
                mark="decode_mark",
                iqr="step_iqr_us",
            ),
            Column(key="launches", header="launches", format=fmt.number),
            Column(
                key="kernels_per_layer",
                header=f"{operators_or_kernels(rows)} a layer",
                format=fmt.number,
            ),
            Column(key="copy_share", header="of the copy (%)", format=fmt.percent),
            Column(key="speedup", header="speed-up", format=fmt.factor),
            Column(key="reason_words", header="why not"),
        ],
    )
    built.footnotes += footnotes
    return built


@finding("graph_effect")
def say(rows: pd.DataFrame) -> str | None:
    known = told(rows, "speedup", "verdict")
    replayed = known[known["cuda_graph"].astype(bool)]
    if replayed.empty:
        known = rows[rows["copy_share"].notna() & ~rows["cuda_graph"].astype(bool)]
        if known.empty:
            return None
        shares = percent_span(known["copy_share"])
        return sentence(f"without graphs, steps reach {shares} of the copy bandwidth")
    parts = [
        f"{name} takes {span(1 / part['speedup'])} of its time as a graph"
        for name, part in replayed.groupby("attention")
    ]
    return sentence(*parts)
