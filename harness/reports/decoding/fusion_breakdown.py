"""A decoding step kernel by kernel: the standard path beside the fused one."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.findings import listed, sentence
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.decoding.fusion_rows import parts_of, profiled_steps
from harness.reports.decoding.step_rows import UNUSED

CAPTION = (
    "Kernels of one layer of a decoding step by the part of it that launched them, from a profile; "
    "on a CPU operators stand for kernels. The whole step is the median of passes without a "
    "profiler: what it takes beyond its kernels went by between them."
)

ALL = "all kernels"
WHOLE = "whole step, measured"


@table("fusion_breakdown", default=100)
def build(frame: pd.DataFrame) -> Table | None:
    parts = []
    for case in profiled_steps(frame).to_dict("records"):
        kernels = parts_of(case)  # type: ignore[arg-type]
        if not kernels:
            continue
        whole = sum(row["us"] for row in kernels)
        lines = [row | {"share": row["us"] / whole} for row in kernels]
        calls = sum(row["calls"] for row in kernels)
        lines.append({"part": ALL, "short": fmt.ABSENT, "calls": calls, "us": whole, "share": 1.0})
        measured = 1e3 * case["median_ms"] / case["layers"]
        lines.append(
            {"part": WHOLE, "short": fmt.ABSENT, "calls": None, "us": measured, "share": None}
        )
        parts += [{**case, **line} for line in lines]
    if not parts:
        return None
    return make_table(
        caption=CAPTION,
        rows=pd.DataFrame(parts),
        lead=["heads", "batch_size", "seq_len", "attention"],
        keep=["attention"],
        without=(*UNUSED, "profile", "seed"),
        metrics=[
            Column(key="part", header="part"),
            Column(key="short", header="kernel", raw=("kernel_name",)),
            Column(key="calls", header="calls", format=fmt.number, detail=True),
            Column(key="us", header="time (µs)", format=fmt.number),
            Column(key="share", header="share (%)", format=fmt.percent),
        ],
    )


@finding("fusion_breakdown")
def say(rows: pd.DataFrame) -> str | None:
    sums = rows[rows["part"] == ALL]
    words = [
        f"{name} runs {fmt.number(part['calls'].median())} of {fmt.number(part['us'].median())} µs"
        for name, part in sums.groupby("attention", sort=False)
    ]
    unit = "in kernels of a layer (operators on a CPU), by the median, "
    return sentence(f"{unit}{listed(words)}") if words else None
