"""Softmax against the matmuls inside attention, in time and in FLOPs.

Question (e) of the CS336 text's problem nsys_profile. Of explicit attention, whose parts are
kernels of their own; a fused kernel has no parts that a profiler could tell apart.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.profilers.kernels.categories import FLOPS_PER_ELEMENT
from harness.render.kernel_rows import UNUSED, passes, profiled, rows_of
from harness.render.rows import cases_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import sentence, span

CAPTION = (
    "Inside explicit attention, forward, per step and rank: the two matmuls (4 B H S² D FLOPs), "
    f"softmax ({FLOPS_PER_ELEMENT['softmax']} B H S² by convention), and scaling, masking and "
    "casts. Ratios are softmax over matmul."
)

_RANGES = ("scores", "softmax", "final matmul")


@table("attention_parts", default=160)
def build(frame: pd.DataFrame) -> Table | None:
    rows = []
    for case in cases_of(profiled(frame)):
        parts = _parts(case["kernel_profile"])
        if parts is None or not case["head_dim"]:
            continue
        ratio = FLOPS_PER_ELEMENT["softmax"] / (4 * case["head_dim"])
        rows.append({**case, **parts, "flops_ratio": ratio})
    if not rows:
        return None
    found = pd.DataFrame(rows)
    found["time_ratio"] = found["softmax_ms"] / found["matmul_ms"]
    found["slower"] = found["time_ratio"] / found["flops_ratio"]
    return make_table(
        caption=CAPTION,
        rows=found,
        lead=["model", "seq_len"],
        keep=["model"],
        without=UNUSED,
        metrics=[
            Column(key="matmul_ms", header="matmul (ms)", format=fmt.number),
            Column(key="softmax_ms", header="softmax (ms)", format=fmt.number),
            Column(key="rest_ms", header="rest (ms)", format=fmt.number),
            Column(key="time_ratio", header="ratio of times", format=fmt.factor),
            Column(key="flops_ratio", header="ratio of FLOPs", format=_three_digits),
            Column(key="slower", header="softmax time per FLOP", format=fmt.factor),
        ],
    )


@finding("attention_parts")
def say(rows: pd.DataFrame) -> str | None:
    return sentence(
        f"the softmax takes {span(rows['time_ratio'])} the time of the matmuls in attention, with "
        f"{span(rows['flops_ratio'], _three_digits)} their FLOPs"
    )


def _three_digits(value: float) -> str:
    return f"{fmt.number(value)}{fmt.TIMES}"


def _parts(profile: dict[str, Any]) -> dict[str, float] | None:
    found = {"matmul_ms": 0.0, "softmax_ms": 0.0, "rest_ms": 0.0}
    for row in rows_of(profile, "forward"):
        innermost = row["range"].rpartition("/")[2]
        if innermost in _RANGES:
            category = row["category"]
            key = f"{category}_ms" if category in ("matmul", "softmax") else "rest_ms"
            found[key] += row["total_ms"] / passes(profile)
    return found if found["matmul_ms"] else None
