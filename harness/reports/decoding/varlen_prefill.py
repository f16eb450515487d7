"""Prefill of prompts of different lengths: packed end to end, and padded to the longest."""

from __future__ import annotations

import pandas as pd

from harness.analysis.evidence import words_between
from harness.cases import format as fmt
from harness.cases.columns import point_groups
from harness.render.rows import apart_from_unsupported, of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import sentence, span, told

CAPTION = (
    "Prompts through rotary embedding, into the cache and through causal attention: median times, "
    "tokens of the prompts per second, and FLOPs of attention by their real lengths, padding not "
    "counted. Speed-up over the fastest padded batch of the same prompts."
)


def prefilled(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case of task=prefill, with its speed-up over padded prompts."""
    calls = of_task(frame, "prefill")
    if calls.empty:
        return calls
    values = ("median_ms", "low_ms", "high_ms", "tflops", "tokens_per_s")
    rows = per_case(calls, phases=("prefill", "attention"), values=values)
    group = point_groups(rows, ["attention", "layout"])
    padded = rows["layout"].str.startswith("padded")
    baseline = rows[padded].groupby(group[padded])["prefill_median_ms"].min()
    fastest = rows[padded & rows["prefill_median_ms"].notna()].groupby(group)["prefill_median_ms"]
    proof = rows.loc[fastest.idxmin(), "prefill_evidence"].set_axis(fastest.idxmin().index)
    rows["verdict"] = words_between(group.map(proof).tolist(), rows["prefill_evidence"].tolist())
    # Ragged prompts only: the same ones were padded, and equal ones have no padding to save.
    same = rows["layout"].str.endswith("ragged")
    rows["speedup"] = (group.map(baseline) / rows["prefill_median_ms"]).where(same)
    return rows


@table("varlen_prefill", default=40)
def build(frame: pd.DataFrame) -> Table | None:
    rows = prefilled(frame)
    if rows.empty:
        return None
    rows, footnotes = apart_from_unsupported(rows)
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["num_heads", "num_kv_heads", "batch_size", "seq_len", "attention", "layout"],
        keep=["attention", "layout", "seq_len"],
        without=("mode", "warmup_steps", "measure_steps", "kv_len", "causal", "call_compiled"),
        metrics=[
            time_column("prefill", "prefill (ms)"),
            time_column("attention", "attention (ms)"),
            Column(key="prefill_tokens_per_s", header="tokens/s", format=fmt.number),
            Column(key="attention_tflops", header="attention (TFLOP/s)", format=fmt.number),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
            Column(key="speedup", header="over padded", format=fmt.factor),
        ],
    )
    built.footnotes += footnotes
    return built


@finding("varlen_prefill")
def say(rows: pd.DataFrame) -> str | None:
    packed = rows[rows["layout"].str.startswith("packed") & rows["speedup"].notna()]
    medians = span(packed["speedup"]) if len(packed) else ""
    packed = told(packed, "speedup", "verdict")
    if medians and packed.empty:
        return sentence(
            "whether packing pays cannot be told; by medians, packed prompts are "
            f"{medians} as fast as the fastest padded batch of the same prompts"
        )
    parts = [
        f"{name} on packed prompts is {span(part['speedup'])} as fast as the fastest padded batch"
        for name, part in packed.groupby("attention")
    ]
    return sentence(*parts)
