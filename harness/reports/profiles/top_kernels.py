"""The kernels that take longest: question (b) of the CS336 text's problem nsys_profile."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases.columns import POINTS
from harness.profilers.kernels.categories import SMALL_ONES
from harness.render.kernel_rows import (
    OF_A_KERNEL,
    UNUSED,
    passes,
    phases_of,
    profiled,
    rows_of,
    short_name,
    total_ms,
)
from harness.render.rows import cases_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import best_row, percent_span, sentence

MOST = 3

CAPTION = (
    f"The {MOST} kernels with most time in each phase, wherever in the model they ran: calls and "
    "time per step and rank, and their share of the phase's kernel time."
)


@table("top_kernels", default=140)
def build(frame: pd.DataFrame) -> Table | None:
    rows = []
    for case in cases_of(profiled(frame)):
        for phase in phases_of(case["kernel_profile"]):
            rows += [{**case, **row} for row in _top(case["kernel_profile"], phase)]
    if not rows:
        return None
    return make_table(
        caption=CAPTION,
        rows=pd.DataFrame(rows),
        lead=["model", "seq_len"],
        keep=["model"],
        without=UNUSED,
        metrics=[
            Column(key="phase", header="phase"),
            *OF_A_KERNEL,
        ],
    )


@finding("top_kernels")
def say(rows: pd.DataFrame) -> str | None:
    if rows["share"].isna().all():
        return None
    case = [name for name in POINTS if name in rows]
    first = rows.groupby([*case, "phase"], dropna=False, sort=False)["share"].max()
    most = best_row(rows, "share")
    return sentence(
        f"the largest kernel of a phase takes {percent_span(first)} of its kernel time, most of "
        f"{most['phase']} ({most['short']}, {most['category']})"
    )


def _top(profile: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    kernels = rows_of(profile, phase)
    whole, count = total_ms(kernels), passes(profile)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in kernels:
        if row["kernel"] == SMALL_ONES:
            continue
        key = (row["kernel"], row["category"])
        mine = found.setdefault(key, {"calls": 0.0, "total_ms": 0.0})
        mine["calls"] += row["calls"]
        mine["total_ms"] += row["total_ms"]
    longest = sorted(found.items(), key=lambda item: (-item[1]["total_ms"], item[0]))[:MOST]
    return [
        {
            "phase": phase,
            "kernel_name": kernel,
            "short": short_name(kernel),
            "category": category,
            "calls": sums["calls"] / count,
            "ms": sums["total_ms"] / count,
            "mean_us": 1e3 * sums["total_ms"] / sums["calls"],
            "share": sums["total_ms"] / whole if whole else 0.0,
        }
        for (kernel, category), sums in longest
    ]
