"""CS336 problem pytorch_attention: time and memory over head_dim and sequence length."""

from __future__ import annotations

import pandas as pd

from harness.analysis.case_columns import MIB
from harness.cases import format as fmt
from harness.render.predicted_memory import predicted_columns
from harness.render.rows import of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import percent_span, say_out_of_memory, sentence

CAPTION = (
    "Attention alone: median forward and backward times, memory in use before the backward "
    "pass and at the peak, measured and as predicted from the shapes alone."
)


@table("pytorch_attention")
def build(frame: pd.DataFrame) -> Table | None:
    calls = of_task(frame, "attention")
    if calls.empty:
        return None
    rows = per_case(calls, phases=("forward", "backward"))
    rows["peak_mib"] = rows["peak_memory_gib"] * 1024
    rows["predicted_mib"] = rows["predicted_before_backward_mib"]
    before_backward = "before backward (MiB)"
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["attention", "head_dim", "seq_len"],
        keep=["head_dim", "seq_len"],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            _memory("before_backward_mib", "measured", before_backward),
            _memory("predicted_mib", "predicted", before_backward),
            _memory("peak_mib", "measured", "peak (MiB)"),
            *predicted_columns(rows, unit=MIB, group="peak (MiB)"),
        ],
    )


@finding("pytorch_attention")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["before_backward_mib"].notna() & (rows["predicted_mib"] > 0)]
    ratio = known["before_backward_mib"] / known["predicted_mib"]
    return sentence(
        say_out_of_memory(rows) or "no case runs out of memory",
        f"memory before the backward pass is {percent_span(ratio)} of the prediction"
        if len(ratio)
        else None,
    )


def _memory(key: str, header: str, group: str) -> Column:
    return Column(key=key, header=header, group=group, format=fmt.number)
