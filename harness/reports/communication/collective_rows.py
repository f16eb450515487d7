"""Measured collective operations with their bandwidths, for the table and the figure."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import of_task, per_case
from harness.sentences.findings import span
from parallel.collectives import bus_factor

GB = 1e9
"""nccl-tests' unit of bandwidths; its sizes are in powers of two."""

UNUSED = (
    *("attention", "head_dim", "num_heads", "num_kv_heads", "causal", "kv_len", "layout"),
    *("seq_len", "batch_size", "call_compiled", "compile_scope", "compile_mode", "mode"),
    "memory_source",
)
"""Points that an exchange without a model has no use for."""


def say_bandwidths(rows: pd.DataFrame) -> str:
    """``bus bandwidths of 256 MiB on 4 ranks are 310 to 350 GB/s``, of the largest messages."""
    known = rows[rows["bus_gb_s"].notna()]
    most = known[known["world_size"] == known["world_size"].max()]
    largest = most[most["size_mib"] == most["size_mib"].max()]
    return (
        f"bus bandwidths of {largest['size_mib'].iloc[0]:,g} MiB on "
        f"{int(largest['world_size'].iloc[0])} ranks are "
        f"{span(largest['bus_gb_s'], fmt.number)} GB/s over the operations"
    )


def collectives(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case of task=collectives, with ``algorithm_gb_s`` and ``bus_gb_s``."""
    calls = of_task(frame, "collectives")
    if calls.empty:
        return calls
    rows = per_case(calls, phases=("collective",), values=("median_ms", "low_ms", "high_ms"))
    seconds = rows["collective_median_ms"] / 1e3
    rows["algorithm_gb_s"] = rows["size_bytes"].astype(float) / seconds / GB
    factors = [
        bus_factor(name, ranks)
        for name, ranks in zip(rows["collective"], rows["world_size"], strict=True)
    ]
    rows["bus_gb_s"] = rows["algorithm_gb_s"] * factors
    return rows
