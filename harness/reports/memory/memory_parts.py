"""Memory of a step by part, to the byte: predicted beside measured."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.analysis.case_columns import MIB
from harness.cases import format as fmt
from harness.render.kernel_rows import UNUSED
from harness.render.rows import cases_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import percent_span, sentence

CAPTION = (
    "Bytes of what memory holds: by formula, in tensors, and at the peak. Parameters, gradients "
    "and optimizer state are counted from the tensors, activations from the allocator when the "
    "forward pass ends; optimizer state is AdamW's, a float32 count of steps with each tensor."
)

_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer_state",
    "activations": "saved",
    "temporaries": "",
    "communication": "",
    "other": "",
}
"""Parts of the profile, and their names in the prediction."""


@table("memory_parts", default=180)
def build(frame: pd.DataFrame) -> Table | None:
    cases = frame[frame["memory_profile"].notna() & (frame["status"] == "ok")]
    rows = []
    for case in cases_of(cases):
        rows += [{**case, **row} for row in _rows(case["memory_profile"])]
    if not rows:
        return None
    return make_table(
        caption=CAPTION,
        rows=pd.DataFrame(rows),
        lead=["model", "seq_len", "mode"],
        keep=["model", "mode"],
        without=UNUSED,
        metrics=[
            Column(key="part", header="part"),
            Column(key="predicted_bytes", header="predicted (bytes)", format=fmt.integer),
            Column(key="measured_bytes", header="measured (bytes)", format=fmt.integer),
            Column(key="error", header="error (%)", format=_signed_percent),
            Column(key="at_peak_mib", header="at the peak (MiB)", format=fmt.number),
        ],
    )


@finding("memory_parts")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["error"].notna()]
    if known.empty:
        return None
    exact = known[known["error"] == 0]["part"].unique()
    said = f"predicted to the byte: {', '.join(exact)}" if len(exact) else None
    worst = known["error"].abs().max()
    return sentence(said, f"the largest error of a part is {percent_span([worst])}")


def _rows(profile: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for part, predicted_as in _PARTS.items():
        measured = profile["tensor_bytes"].get(part)
        if part == "activations":
            measured = profile["saved_bytes"] or None
        predicted = profile.get("predicted", {}).get(predicted_as) or None
        at_peak = profile["at_peak"].get(part)
        if measured is None and at_peak is None:
            continue
        error = float("nan")
        if measured and predicted:
            error = predicted / measured - 1
        rows.append(
            {
                "part": part,
                "predicted_bytes": predicted if measured is not None else None,
                "measured_bytes": measured,
                "error": error,
                "at_peak_mib": (at_peak or 0) / MIB,
            }
        )
    return rows


def _signed_percent(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:+.2f}"
