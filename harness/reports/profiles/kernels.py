"""Every kernel that matters, by phase and by the range of the model that it ran in."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.render.kernel_rows import OF_A_KERNEL, UNUSED, passes, profiled, short_name, total_ms
from harness.render.rows import cases_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import best_row, percent_span, sentence

LEAST = 0.01

OTHERS = "(all others)"

CAPTION = (
    "Kernels by phase and range of the model, all blocks together: calls and time per step and "
    "rank, and shares of all kernel time of the step. Those below "
    f"{100 * LEAST:g}% are the last row of each case; the record has them all. In the backward "
    "pass a kernel belongs to the range whose gradient it computes; again: a part of the forward "
    "pass that checkpointing repeats."
)


@table("kernels", default=150)
def build(frame: pd.DataFrame) -> Table | None:
    rows = []
    for case in cases_of(profiled(frame)):
        rows += [{**case, **row} for row in _rows(case["kernel_profile"])]
    if not rows:
        return None
    built = make_table(
        caption=CAPTION,
        rows=pd.DataFrame(rows),
        lead=["model", "seq_len"],
        keep=["model"],
        without=UNUSED,
        metrics=[
            Column(key="phase", header="phase"),
            Column(key="range", header="range"),
            *OF_A_KERNEL,
        ],
    )
    built.is_listing = True
    return built


@finding("kernels")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["category"] != fmt.ABSENT]
    if known.empty:
        return None
    most = best_row(known, "share")
    return sentence(
        f"no kernel takes a larger share of a profiled step than {most['short']} in "
        f"{most['phase']}, {most['range']}: {percent_span([most['share']])}"
    )


def _rows(profile: dict[str, Any]) -> list[dict[str, Any]]:
    whole, count = total_ms(profile["rows"]), passes(profile)
    large = [row for row in profile["rows"] if row["total_ms"] >= LEAST * whole]
    small = [row for row in profile["rows"] if row["total_ms"] < LEAST * whole]
    found = [
        {
            "phase": f"{row['phase']}, again" if row["recomputed"] else row["phase"],
            "range": row["range"] or fmt.ABSENT,
            "kernel_name": row["kernel"],
            "short": short_name(row["kernel"]),
            "category": row["category"],
            **_numbers(row["calls"], row["total_ms"], count, whole),
        }
        for row in large
    ]
    if small:
        words = dict.fromkeys(("phase", "range", "category"), fmt.ABSENT)
        calls = sum(row["calls"] for row in small)
        numbers = _numbers(calls, total_ms(small), count, whole)
        found.append({**words, "kernel_name": OTHERS, "short": OTHERS, **numbers})
    return found


def _numbers(calls: float, total: float, count: int, whole: float) -> dict[str, float]:
    return {
        "calls": calls / count,
        "ms": total / count,
        "mean_us": 1e3 * total / calls,
        "share": total / whole if whole else 0.0,
    }
