"""Ways to run one training step: launched from Python, compiled, captured in CUDA graphs."""

from __future__ import annotations

import pandas as pd

WAYS = ("cuda_graph", "compile_scope", "compile_mode")
"""The columns in which they differ."""


def way_of(row: pd.Series) -> str:
    """The words for a row's way: ``captured, compiled by block``."""
    words = ["captured"] if row["cuda_graph"] else []
    if row["compile_scope"] != "none":
        words.append(f"compiled by {row['compile_scope']}")
    if row["compile_mode"] != "default":
        words.append(row["compile_mode"])
    return ", ".join(words) or "launched"
