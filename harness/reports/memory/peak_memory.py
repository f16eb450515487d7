"""Peak memory, predicted beside measured: the CS336 text's problem memory_profiling, (b) to (d)."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.analysis.case_columns import GIB, MIB
from harness.cases import format as fmt
from harness.render.kernel_rows import UNUSED
from harness.render.rows import per_case
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import best_row, sentence, span

CAPTION = (
    "Most memory that tensors held at once in one step, by formula and as allocated; activations "
    "that are kept when the forward pass ends, likewise; and the size of one tensor of the "
    "residual stream."
)


@table("peak_memory", default=170)
def build(frame: pd.DataFrame) -> Table | None:
    rows = frame[frame["profile"] == "memory"]
    rows = rows[rows["memory_profile"].notna() | (rows["status"] != "ok")]
    if rows.empty:
        return None
    rows = per_case(rows)
    found = pd.DataFrame([_numbers(row) for _, row in rows.iterrows()], index=rows.index)
    return make_table(
        caption=CAPTION,
        rows=rows.join(found),
        lead=["model", "seq_len", "mode"],
        keep=["model", "mode"],
        without=UNUSED,
        metrics=[
            Column(key="predicted", header="predicted", format=fmt.number, group="peak (GiB)"),
            Column(
                key="measured",
                header="measured",
                format=fmt.number,
                group="peak (GiB)",
                status="status",
            ),
            Column(key="ratio", header="predicted / measured", format=fmt.factor),
            Column(
                key="saved_predicted",
                header="predicted",
                format=fmt.number,
                group="activations (GiB)",
            ),
            Column(
                key="saved_measured",
                header="measured",
                format=fmt.number,
                group="activations (GiB)",
            ),
            Column(key="stream", header="residual stream (MiB)", format=fmt.number),
        ],
    )


@finding("peak_memory")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["measured"].notna()]
    if known.empty:
        return None
    most = best_row(known, "measured")
    ratio = None
    if known["ratio"].notna().any():
        ratio = f"predictions are {span(known['ratio'])} what is measured"
    return sentence(f"the highest peak is {fmt.number(most['measured'])} GiB", ratio)


def _numbers(row: pd.Series) -> dict[str, Any]:
    profile = row["memory_profile"]
    found: dict[str, Any] = dict.fromkeys(
        ("predicted", "measured", "ratio", "saved_predicted", "saved_measured", "stream"),
        float("nan"),
    )
    found["predicted"] = row["predicted_memory_gib"]
    if not isinstance(profile, dict) or row["status"] != "ok":
        return found
    found["measured"] = profile["peak_bytes"] / GIB
    found["ratio"] = found["predicted"] / found["measured"]
    if profile["saved_bytes"]:
        found["saved_measured"] = profile["saved_bytes"] / GIB
        found["saved_predicted"] = profile.get("predicted", {}).get("saved", float("nan")) / GIB
    if "residual_stream_bytes" in profile:
        found["stream"] = profile["residual_stream_bytes"] / MIB
    return found
