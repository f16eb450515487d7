"""Kernels of a decoding step by the part of it that launched them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness import format as fmt
from harness.tables._profiles import passes, profiled

PARTS = (
    *("positions", "rotary_q", "rotary_k", "rotary_qk", "append", "up_projection", "absorb_q"),
    *("attention", "scores", "mask", "softmax", "values", "absorb_v", "fused"),
)
"""In the order in which a step comes to them."""


def profiled_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Cases of task=decode whose kernels were profiled, one row each."""
    rows = profiled(frame[frame["task"] == "decode"])
    return rows[rows["phase"] == "decode"].drop_duplicates("case_id")


def parts_of(case: pd.Series | dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels of a step, in its order: ``part``, ``kernel``, ``calls`` and ``us`` of one layer."""
    profile = case["kernel_profile"]
    count = passes(profile) * int(case["layers"])
    found = [
        {
            "part": _part(row["range"]),
            "kernel": row["kernel"],
            "calls": row["calls"] / count,
            "us": 1e3 * row["total_ms"] / count,
        }
        for row in profile["rows"]
        if row["phase"] == "decode"
    ]
    return sorted(found, key=lambda row: (_place(row["part"]), -row["us"]))


def _part(path: str) -> str:
    """The innermost range that is a part of a step."""
    known = [name for name in path.split("/") if name in PARTS]
    return known[-1] if known else fmt.ABSENT


def _place(part: str) -> int:
    return PARTS.index(part) if part in PARTS else len(PARTS)
