"""CS336 problem benchmarking_mixed_precision (a): the dtype of every tensor, by precision."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases.columns import POINTS, point_groups, sorted_values
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.precision.audit_rows import UNUSED, audits, without_block
from harness.sentences.findings import listed, sentence

CAPTION = (
    "dtype of every tensor of a training step, in the order in which they come to be; blocks are "
    "alike and stand in one row. torch.autocast has other rules for a CPU than for CUDA, where it "
    "runs layer_norm in float32."
)

_VARIED = ("precision", "compute", "tf32")

_WORDS = {
    "parameter": "parameters",
    "output": "output of {name}",
    "loss": "loss",
    "output_gradient": None,
    "gradient": "gradients of parameters",
    "optimizer_state": "optimizer state {name}",
}


@table("precision_dtypes")
def build(frame: pd.DataFrame) -> Table | None:
    cases = audits(frame)
    if cases.empty:
        return None
    names = [name for name in POINTS if name != "precision" and name in cases]
    precisions = sorted_values(cases, "precision")
    rows: list[dict[Any, Any]] = []
    for _, group in cases.groupby(point_groups(cases, _VARIED), sort=False):
        found = {
            precision: _dtypes(audit)
            for precision, audit in zip(group["precision"], group["audit"], strict=True)
        }
        for tensor in dict.fromkeys(name for dtypes in found.values() for name in dtypes):
            cells = {f"dtype {name}": dtypes.get(tensor) for name, dtypes in found.items()}
            rows.append({**group.iloc[0][names].to_dict(), "tensor": tensor, **cells})
    return make_table(
        caption=CAPTION,
        rows=pd.DataFrame(rows),
        lead=["model", "attention"],
        keep=["model"],
        without=[*UNUSED, "precision"],
        metrics=[
            Column(key="tensor", header="tensor"),
            *(Column(key=f"dtype {name}", header=name) for name in precisions),
        ],
    )


@finding("precision_dtypes")
def say(rows: pd.DataFrame) -> str | None:
    words = []
    for column in (name for name in rows.columns if str(name).startswith("dtype ")):
        known = rows[column].dropna()
        low = known[~known.str.contains("float32|float64")]
        name = str(column).removeprefix("dtype ")
        words.append(f"{len(low)} of {len(known)} with {name}")
    return sentence(f"kinds of tensors of less than 32 bits: {listed(words)}") if words else None


def _dtypes(audit: dict[str, Any]) -> dict[str, str]:
    """The dtypes of each row of the table; several in one row are all named."""
    found: dict[str, dict[str, None]] = {}
    for tensor in audit["tensors"]:
        words = _WORDS[tensor["kind"]]
        if words is not None:
            name = words.format(name=without_block(tensor["name"])).replace(
                "output of logits", "logits"
            )
            found.setdefault(name, {})[tensor["dtype"]] = None
    return {name: ", ".join(dtypes) for name, dtypes in found.items()}
