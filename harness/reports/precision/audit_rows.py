"""Rows of precision audits: the model of each audit, and its blocks taken together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from harness.render.rows import per_case

UNUSED = ("task", "mode", "memory_source")

TOY = "ToyModel"

COUNTS = ("elements", "overflowed", "underflowed", "subnormal")


def audits(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per audited case; ToyModel has a name, and neither attention nor a length."""
    rows = frame[frame["audit"].notna()]
    if rows.empty:
        return rows
    rows = per_case(rows)
    toy = rows["model"].isna()
    rows = rows.astype({"model": object, "attention": object, "seq_len": float})
    rows.loc[toy, "model"] = TOY
    rows.loc[toy, ["attention", "seq_len"]] = None
    return rows


def without_block(name: str) -> str:
    """``blocks.3.attention.q`` -> ``blocks.*.attention.q``: all blocks are of one make."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def tensors_of(audit: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [tensor for tensor in audit["tensors"] if tensor["kind"] == kind]


def relative_error(tensors: Iterable[dict[str, Any]]) -> float:
    """Norm of all differences over that of all references; infinite where anything overflowed."""
    tensors = list(tensors)
    if any(tensor["error_norm"] is None for tensor in tensors):
        return float("inf")
    error = sum(tensor["error_norm"] ** 2 for tensor in tensors)
    reference = sum(tensor["reference_norm"] ** 2 for tensor in tensors)
    return float((error / reference) ** 0.5) if reference else float("nan")


def total(tensors: Iterable[dict[str, Any]], count: str) -> int:
    return sum(tensor[count] for tensor in tensors)
