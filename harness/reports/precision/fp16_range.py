"""Overflow and underflow of float16 in each layer, forward and backward."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.precision.audit_rows import (
    COUNTS,
    UNUSED,
    audits,
    tensors_of,
    total,
    without_block,
)
from harness.sentences.findings import best_row, sentence

CAPTION = (
    "Elements of what each layer gives, and of the gradient that arrives at it, which float16 "
    "has no number for: overflow became infinite or NaN, underflow became zero and is not, "
    "subnormal is below 2^-14 and kept with fewer digits. Blocks are summed."
)

_HEADERS = dict(zip(COUNTS, ("elements", "overflow", "underflow", "subnormal"), strict=True))

_KINDS = {"output": "forward", "output_gradient": "backward"}


@table("fp16_range")
def build(frame: pd.DataFrame) -> Table | None:
    cases = audits(frame)
    cases = cases[cases["compute"] == "float16"]
    if cases.empty:
        return None
    rows: list[dict[Any, Any]] = []
    for _, case in cases.iterrows():
        rows += [{**case.to_dict(), **layer} for layer in _layers(case["audit"])]
    columns = [
        Column(key=f"{kind}_{count}", header=_HEADERS[count], group=words, format=fmt.integer)
        for kind, words in _KINDS.items()
        for count in COUNTS[1:]
    ]
    return make_table(
        caption=CAPTION,
        rows=pd.DataFrame(rows),
        lead=["model", "attention", "precision"],
        keep=["model"],
        without=UNUSED,
        metrics=[
            Column(key="layer", header="layer"),
            Column(key="output_elements", header="elements", format=fmt.integer),
            *columns,
        ],
    )


@finding("fp16_range")
def say(rows: pd.DataFrame) -> str | None:
    over = int(rows["output_overflowed"].sum() + rows["output_gradient_overflowed"].sum())
    under = rows["output_gradient_underflowed"]
    worst = best_row(rows, "output_gradient_underflowed")
    share = under.max() / max(1, worst["output_elements"])
    return sentence(
        f"{fmt.integer(over)} elements overflow",
        f"underflow is worst in the gradient at {worst['layer']} with {worst['precision']}, "
        f"{100 * share:.1f}% of its elements"
        if under.max() > 0
        else "no gradient underflows",
    )


def _layers(audit: dict[str, Any]) -> list[dict[str, Any]]:
    layers: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for kind in _KINDS:
        for tensor in tensors_of(audit, kind):
            layer = layers.setdefault(without_block(tensor["name"]), {name: [] for name in _KINDS})
            layer[kind].append(tensor)
    return [
        {
            "layer": name,
            **{
                f"{k}_{count}": total(found, count)
                for k, found in layer.items()
                for count in COUNTS
            },
        }
        for name, layer in layers.items()
    ]
