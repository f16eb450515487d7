"""Rows of decoding steps: their rates, and the roof of the device."""

from __future__ import annotations

import pandas as pd

from harness.cases.column import Point
from harness.cases.columns import POINTS
from harness.render.rows import of_task, per_case
from kernels.caches import CACHES

UNUSED = (
    *("warmup_steps", "measure_steps", "mode", "kv_len", "layout", "causal", "call_compiled"),
    *("num_heads", "num_kv_heads", "head_dim"),
)
"""Points that steps from a cache have no use for, or that say the same twice."""

POINTS.declare("heads", Point(header="heads", describe="heads {}".format, after="batch_size"))


def decoded(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case of task=decode.

    ``heads`` in words, and of its decode phase: ``step_us`` and ``step_iqr_us``, ``gb_s`` by the
    bytes that have to move, ``copy_share`` of the copy bandwidth that the same worker measured,
    ``predicted_us`` at that bandwidth, and ``roof_share``: the least time that bytes and FLOPs
    allow over the measured, by the rate of a matmul that the same worker measured, or where an
    older record has none (``from_datasheet``) by the datasheet's peak.
    """
    steps = of_task(frame, "decode")
    if steps.empty:
        return steps
    values = ("median_ms", "low_ms", "high_ms", "work_bytes", "work_flops", "tokens_per_s")
    rows = per_case(steps, phases=("decode", "prefill", "step"), values=values)
    for key in ("copy_bandwidth_gb_s", "matmul_tflops", "kernels", "launches"):
        rows[key] = [
            note.get(key, float("nan")) if isinstance(note, dict) else float("nan")
            for note in rows["decode"]
        ]
    ms, moved = rows["decode_median_ms"], rows["decode_work_bytes"].astype(float)
    rows["step_us"], rows["step_iqr_us"] = ms * 1e3, rows["decode_iqr_ms"] * 1e3
    rows["gb_s"] = moved / ms / 1e6
    rows["copy_share"] = rows["gb_s"] / rows["copy_bandwidth_gb_s"]
    rows["predicted_us"] = moved / rows["copy_bandwidth_gb_s"] / 1e3
    rows["from_datasheet"] = rows["matmul_tflops"].isna() & rows["peak_tflops"].notna()
    tflops = rows["matmul_tflops"].fillna(rows["peak_tflops"])
    by_flops_us = rows["decode_work_flops"].astype(float) / tflops / 1e6
    least_us = rows["predicted_us"].combine(by_flops_us, max)
    rows["roof_share"] = (least_us / rows["step_us"]).where(by_flops_us.notna())
    rows["heads"] = heads_of(rows)
    rows["kernels_per_layer"] = rows["kernels"] / rows["layers"]
    rows["tokens_per_s"] = rows["decode_tokens_per_s"]
    return rows


def heads_of(rows: pd.DataFrame) -> list[str]:
    """Heads of each case in words: ``32:8 of 128``, ``128 of 128, rank 512 + 64``."""
    found = []
    for case in rows["case"]:
        task, cache = case["task"], case.get("cache") or {}
        is_latent = bool(cache) and CACHES[cache["name"]].target(**cache).is_latent
        grouped = f":{task['num_kv_heads']}" if task.get("num_kv_heads") else ""
        words = f"{task['num_heads']}{grouped} of {task['head_dim']}"
        if is_latent:
            words += f", rank {task['kv_lora_rank']} + {task['rope_head_dim']}"
        found.append(words)
    return found


def operators_or_kernels(rows: pd.DataFrame) -> str:
    """The word for the counted launches: a CPU runs operators."""
    return "operators" if bool((rows["device"] == "cpu").all()) else "kernels"
