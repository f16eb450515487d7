"""Tokens per second of the whole model, of reading prompts and of generating apart."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import apart_from_unsupported, of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.decoding.step_rows import operators_or_kernels
from harness.sentences.findings import say_out_of_memory, sentence, span
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Greedy generation with the whole model: prefill of all prompts, and one step of one token for "
    "each, median times and tokens per second of the batch. A step has to read the weights and the "
    "cache once; its share of the copy bandwidth that the same process measured is by those bytes."
)

UNUSED = (
    *("warmup_steps", "measure_steps", "mode", "kv_len", "layout", "causal", "call_compiled"),
    *("num_heads", "num_kv_heads", "head_dim", "compile_scope", "compile_mode"),
)


def generated(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case of task=generate, with the rates of both phases."""
    passes = of_task(frame, "generate")
    if passes.empty:
        return passes
    values = ("median_ms", "low_ms", "high_ms", "tokens_per_s", "work_bytes", "mfu")
    rows = per_case(passes, phases=("prefill", "decode"), values=values)
    for key in ("copy_bandwidth_gb_s", "kernels", "launches"):
        rows[key] = [
            note[key] if isinstance(note, dict) else float("nan") for note in rows["generate"]
        ]
    rows["output_len"] = [case["task"]["output_len"] for case in rows["case"]]
    moved = rows["decode_work_bytes"].astype(float)
    rows["copy_share"] = moved / rows["decode_median_ms"] / 1e6 / rows["copy_bandwidth_gb_s"]
    return rows


@table("generate", default=50)
def build(frame: pd.DataFrame) -> Table | None:
    rows = generated(frame)
    if rows.empty:
        return None
    rows, footnotes = apart_from_unsupported(rows)
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "batch_size", "seq_len", "attention", "cache"],
        keep=["model", "attention", "cache"],
        without=UNUSED,
        metrics=[
            Column(key="output_len", header="generated", format=fmt.integer, detail=True),
            time_column("prefill", "prefill (ms)"),
            Column(key="prefill_tokens_per_s", header="prefill (tokens/s)", format=fmt.number),
            time_column("decode", "step (ms)"),
            Column(key="decode_tokens_per_s", header="generated (tokens/s)", format=fmt.number),
            Column(key="copy_share", header="of the copy (%)", format=fmt.percent),
            Column(key="kernels", header=f"{operators_or_kernels(rows)} a step", format=fmt.number),
            Column(key="launches", header="launches", format=fmt.number, detail=True),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
            Column(key="check_error", header="error", format=fmt.scientific, detail=True),
        ],
    )
    built.footnotes += footnotes
    return built


@finding("generate")
def say(rows: pd.DataFrame) -> str | None:
    rates = rows["decode_tokens_per_s"].dropna()
    return sentence(
        say_fastest(rows, "decode_median_ms"),
        f"{span(rates, fmt.number)} tokens/s are generated" if len(rates) else None,
        say_out_of_memory(rows),
    )
