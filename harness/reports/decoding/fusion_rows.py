"""Kernels of a decoding step by the part of it that launched them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.render.kernel_rows import passes, profiled, short_name
from harness.render.rows import of_task
from harness.reports.decoding.step_rows import heads_of

PARTS = (
    *("positions", "rotary_q", "rotary_k", "rotary_qk", "append", "rotary_append"),
    *("up_projection", "absorb_q"),
    *("attention", "scores", "mask", "softmax", "values", "absorb_v", "fused"),
)
"""Parts of a decoding step, in the order in which they run."""

LEAST = 0.02
"""Share of a step's kernel time below which a kernel is one of the others."""

OTHERS = "(others)"


def profiled_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Cases of task=decode whose kernels were profiled, one row each."""
    rows = profiled(of_task(frame, "decode"))
    rows = rows[rows["phase"] == "decode"].drop_duplicates("case_id")
    return rows.assign(heads=heads_of(rows)) if len(rows) else rows


def parts_of(case: pd.Series | dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels of a step, in its order: ``part``, ``kernel_name``, ``calls`` and ``us`` a layer."""
    profile = case["kernel_profile"]
    count = passes(profile) * int(case["layers"])
    rows = [
        {
            "part": _part(row["range"]),
            "kernel_name": row["kernel"],
            "short": short_name(row["kernel"]),
            "calls": row["calls"] / count,
            "us": 1e3 * row["total_ms"] / count,
        }
        for row in profile["rows"]
        if row["phase"] == "decode"
    ]
    return sorted(_large(rows), key=lambda row: (_place(row["part"]), -row["us"]))


def _large(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels that matter, and those that do not as one for each part."""
    least = LEAST * sum(row["us"] for row in rows)
    found = [row for row in rows if row["us"] >= least]
    small: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["us"] < least:
            start = {
                "part": row["part"],
                "kernel_name": OTHERS,
                "short": OTHERS,
                "calls": 0.0,
                "us": 0.0,
            }
            others = small.setdefault(row["part"], start)
            others["calls"] += row["calls"]
            others["us"] += row["us"]
    return [*found, *small.values()]


def _part(path: str) -> str:
    """The innermost range that is a part of a step."""
    known = [name for name in path.split("/") if name in PARTS]
    return known[-1] if known else fmt.ABSENT


def _place(part: str) -> int:
    return PARTS.index(part) if part in PARTS else len(PARTS)
