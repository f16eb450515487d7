"""FLOPs of causal attention in each step of a ring, in which all ranks wait for the busiest."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.context.balance_rows import COUNT_WORDS, counted
from harness.reports.context.flop_balance import POINT_COLUMNS, UNUSED, gflop
from harness.sentences.findings import by_name, sentence

CAPTION = (
    "FLOPs of a causal forward pass in each ring step, on the least and the most busy rank, and "
    "how many ranks have anything to do. By pairs: what the mask keeps, exactly. By tiles: whole "
    "tiles of the kernel."
)


@table("flop_balance_steps")
def build(frame: pd.DataFrame) -> Table | None:
    cases = counted(frame)
    if cases.empty:
        return None
    rows: list[dict[Any, Any]] = []
    for _, case in cases.iterrows():
        balance = case["counts"]
        # Groups of ranks that exchange heads form a ring of as many steps as there are groups.
        for step in range(len(balance.pair[0])):
            found: dict[str, float] = {"step": step}
            for name in ("pair", "tile"):
                flops = [rank[step] / 1e9 for rank in getattr(balance, name)]
                found |= {f"{name}_min": min(flops), f"{name}_max": max(flops)}
                found["busy"] = sum(value > 0 for value in flops)
            rows.append({**case.to_dict(), **found})
    columns = [Column(key="busy", header="busy ranks", format=fmt.integer)]
    for name in ("pair", "tile"):
        group = COUNT_WORDS[name]
        columns += [
            Column(key=f"{name}_min", header="least (GFLOP)", format=gflop, group=group),
            Column(key=f"{name}_max", header="most (GFLOP)", format=gflop, group=group),
        ]
    return make_table(
        caption=CAPTION,
        rows=pd.DataFrame(rows),
        lead=[*POINT_COLUMNS, "step"],
        keep=["split"],
        without=UNUSED,
        metrics=columns,
    )


@finding("flop_balance_steps")
def say(rows: pd.DataFrame) -> str | None:
    words = []
    for name, part in rows.groupby("split", sort=False):
        idle = (part["ranks"] - part["busy"]).sum() / part["ranks"].sum()
        words.append((f"{100 * idle:.0f}%", str(name)))
    return sentence(f"ranks have nothing to compute in {by_name(words, 'of their steps')}")
