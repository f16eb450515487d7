"""FLOPs of causal attention on each rank, and in each half of its tokens."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.context.balance_rows import COUNTS_EXPLAINED, counted
from harness.reports.context.flop_balance import POINT_COLUMNS, UNUSED, gflop
from harness.sentences.findings import by_name, sentence

CAPTION = (
    f"FLOPs of a causal forward pass on each rank. {COUNTS_EXPLAINED} First and second half: of "
    "the rank's tokens, by chunks; with zigzag its early and its late chunk."
)


@table("flop_balance_ranks")
def build(frame: pd.DataFrame) -> Table | None:
    cases = counted(frame)
    if cases.empty:
        return None
    rows: list[dict[Any, Any]] = []
    for _, case in cases.iterrows():
        balance = case["counts"]
        for rank, halves in enumerate(balance.chunk):
            found = {name: balance.per_rank(name)[rank] / 1e9 for name in ("chunk", "pair", "tile")}
            parts = {"first": halves[0] / 1e9, "second": sum(halves[1:]) / 1e9}
            rows.append({**case.to_dict(), "rank": rank, **parts, **found})
    headers = {
        "first": "first half (GFLOP)",
        "second": "second half (GFLOP)",
        "chunk": "by chunks (GFLOP)",
        "pair": "by pairs (GFLOP)",
        "tile": "by tiles (GFLOP)",
    }
    return make_table(
        caption=CAPTION,
        rows=pd.DataFrame(rows),
        lead=[*POINT_COLUMNS, "rank"],
        keep=["split"],
        without=UNUSED,
        metrics=[Column(key=key, header=header, format=gflop) for key, header in headers.items()],
    )


@finding("flop_balance_ranks")
def say(rows: pd.DataFrame) -> str | None:
    words = []
    for name, part in rows.groupby("split", sort=False):
        mean = part.groupby("rank")["pair"].mean()
        words.append((fmt.factor(mean.iloc[-1] / mean.iloc[0]), str(name)))
    return sentence(f"the last rank computes {by_name(words, 'what the first does')}")
