"""Bytes that ranks send in a training step, counted from the operations they call."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.data.step_rows import UNUSED, on_ranks, traffic_of
from harness.sentences.findings import best_row, sentence
from parallel.collectives import COLLECTIVES

CAPTION = (
    "Communication of one training step, counted where a rank calls it: calls; size in MiB that "
    "goes through each operation, as nccl-tests define it; and what a link of the rank carries "
    "for that, by the factors of the bus bandwidth, beside the formula for the strategy."
)


@table("communication_volume")
def build(frame: pd.DataFrame) -> Table | None:
    rows = on_ranks(frame)
    # Split attention also sends keys and values, for which there is no formula here.
    rows = rows[(rows["status"] == "ok") & (rows["cp"] == 1)] if len(rows) else rows
    if rows.empty:
        return None
    pairs = zip(rows["case"], rows["traffic"], strict=True)
    found = pd.DataFrame([traffic_of(case, counted) for case, counted in pairs], index=rows.index)
    found = found.reindex(columns=[*COLLECTIVES, "calls", "sent", "predicted"])
    rows = pd.concat([rows.drop(columns=["traffic"]), found], axis=1)
    if rows["sent"].isna().all():
        return None
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "world_size", "precision", "strategy"],
        keep=["strategy"],
        without=UNUSED,
        metrics=[
            Column(key="calls", header="calls", format=fmt.integer),
            *(Column(key=name, header=f"{name} (MiB)", format=fmt.number) for name in COLLECTIVES),
            Column(key="sent", header="sent (MiB)", format=fmt.number),
            Column(key="predicted", header="by formula (MiB)", format=fmt.number),
        ],
    )


@finding("communication_volume")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["sent"].notna()]
    if known.empty:
        return None
    least, most = (best_row(known, "sent", highest=high) for high in (False, True))
    low, high = (fmt.number(row["sent"]) for row in (least, most))
    if low != high:
        return sentence(
            f"{least['strategy']} sends least, {low} MiB, and {most['strategy']} most, {high}"
        )
    if len(known) == 1:
        return sentence(f"{least['strategy']} sends {low} MiB")
    return sentence(f"all send the same to three digits, {low} MiB")
