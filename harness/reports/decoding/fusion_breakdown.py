"""A decoding step kernel by kernel: the standard path beside the fused one."""

from __future__ import annotations

import pandas as pd

from harness.analysis.physics import OVER_PASS
from harness.cases import format as fmt
from harness.render.rows import marks_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.decoding.fusion_rows import parts_of, profiled_steps
from harness.reports.decoding.step_rows import UNUSED
from harness.sentences.findings import listed, sentence

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
    steps = profiled_steps(frame)
    for case in steps.assign(mark=marks_of(steps)).to_dict("records"):
        kernels = parts_of(case)  # type: ignore[arg-type]
        if not kernels:
            continue
        whole = sum(row["us"] for row in kernels)
        lines = [row | {"share": row["us"] / whole} for row in kernels]
        calls = sum(row["calls"] for row in kernels)
        measured = 1e3 * case["median_ms"] / case["layers"]
        slowed = whole > OVER_PASS * measured
        of_all = {"part": ALL, "short": fmt.ABSENT, "calls": calls, "us": whole, "share": 1.0}
        if slowed:
            of_all |= {"line_mark": fmt.CIRCLED_SLASH, "line_impossible": ["kernels"]}
        of_whole = {"part": WHOLE, "short": fmt.ABSENT, "us": measured}
        of_whole |= {
            "line_mark": case["mark"],
            "line_disturbed": case["disturbed"],
            "line_iqr_us": 1e3 * case["iqr_ms"] / case["layers"],
        }
        nothing = {"line_mark": "", "line_disturbed": [], "line_impossible": []}
        parts += [{**case, **nothing, **line} for line in (*lines, of_all, of_whole)]
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
            Column(
                key="us",
                header="time (µs)",
                format=fmt.number,
                mark="line_mark",
                iqr="line_iqr_us",
            ),
            Column(key="share", header="share (%)", format=fmt.percent),
        ],
    )


@finding("fusion_breakdown")
def say(rows: pd.DataFrame) -> str | None:
    sums = rows[rows["part"] == ALL]
    words = [
        f"{fmt.count(part['calls'].median())} with {name} ({fmt.number(part['us'].median())} µs)"
        for name, part in sums.groupby("attention", sort=False)
    ]
    unit = "kernels of a layer in the median case (operators on a CPU): "
    return sentence(f"{unit}{listed(words)}") if words else None
