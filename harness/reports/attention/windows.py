"""Attention with a window, a cap of the scores or sinks: times, and rates over what is seen."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import NO_MASK, point_groups
from harness.render.rows import apart_from_unsupported, of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import say_out_of_memory, sentence
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Attention with a sliding window (none: a query sees all keys before it), a cap of the scores, "
    "or sinks: median times, the rate of both passes by the FLOP formula over the query-key pairs "
    "that the mask keeps, and the time as a multiple of the fastest's at the same point."
)

PHASES = ("forward", "backward", "forward_backward")


@table("windows")
def build(frame: pd.DataFrame) -> Table | None:
    calls = of_task(frame, "attention")
    if calls.empty or not is_masked(calls).any():
        return None
    rows = per_case(calls, phases=PHASES, values=("median_ms", "tflops"))
    rows, footnotes = apart_from_unsupported(rows)
    whole = rows["forward_backward_median_ms"].fillna(rows["forward_median_ms"])
    rows["tflops"] = rows["forward_backward_tflops"].fillna(rows["forward_tflops"])
    rows["of_fastest"] = whole / whole.groupby(point_groups(rows, ["attention"])).transform("min")
    rows["both_evidence"] = rows["forward_backward_evidence"].where(
        rows["forward_backward_median_ms"].notna(), rows["forward_evidence"]
    )
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["window", "attention"],
        keep=["window", "attention"],
        order=[
            *("num_heads", "num_kv_heads", "head_dim", "precision", "seq_len"),
            *("softcap", "sinks", "prefix_len", "window", "attention"),
        ],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            time_column("forward_backward", "both (ms)"),
            Column(key="tflops", header="TFLOP/s", format=fmt.number),
            Column(key="of_fastest", header="of the fastest", format=fmt.factor),
        ],
    )
    built.footnotes += footnotes
    return built


def is_masked(rows: pd.DataFrame) -> pd.Series:
    """Rows of calls that ask for more than a causal mask."""
    set_ones = (rows["window"] != NO_MASK) | (rows["softcap"] != NO_MASK)
    return set_ones | rows["sinks"].astype(bool) | (rows["prefix_len"] > 0)


@finding("windows")
def say(rows: pd.DataFrame) -> str | None:
    both = rows["forward_backward_median_ms"].fillna(rows["forward_median_ms"])
    windowed = rows["window"] != NO_MASK
    parts = []
    for words, chosen in (("with a window", windowed), ("without one", ~windowed)):
        found = say_fastest(rows.assign(both=both)[chosen], "both", evidence="both_evidence")
        parts.append(f"{words} {found}" if found else None)
    return sentence(*parts, say_out_of_memory(rows))
