"""Rows of FLOPs counted per rank."""

from __future__ import annotations

import pandas as pd

from harness.render.rows import per_case
from harness.reports.context.points import declare_points
from parallel.context.blocks.balance import Balance

declare_points()

COUNT_WORDS = {"chunk": "by chunks", "pair": "by pairs", "tile": "by tiles"}

COUNTS_EXPLAINED = (
    "By chunks: each half of a rank's tokens is charged all keys up to its end, as published "
    "guides count. By pairs: what the mask keeps, exactly. By tiles: whole tiles of the kernel."
)


def counted(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case of task=flop_balance that counted, with ``counts``, ``split``, ``ranks``."""
    rows = frame[frame["balance"].notna()]
    if rows.empty:
        return rows
    rows = per_case(rows)
    return rows.assign(
        counts=pd.Series([Balance(**values) for values in rows["balance"]], dtype=object),
        split=rows["balance_layout"].str.replace("_", "/"),
        ranks=rows["balance_ranks"].astype(int),
    )
