"""Time and bandwidth of each collective operation by size and ranks, on gloo or NCCL."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.communication.collective_rows import UNUSED, collectives, say_bandwidths
from harness.sentences.findings import sentence, span

CAPTION = (
    "Median time of a collective operation, from when all ranks are ready until the slowest is "
    "done; algorithm bandwidth, size over time, and bus bandwidth, what links carry, by the "
    "formulas of nccl-tests in GB/s of 1e9 bytes; wrong: elements of all ranks' results that "
    "were not what they had to be."
)


@table("distributed_communication")
def build(frame: pd.DataFrame) -> Table | None:
    rows = collectives(frame)
    if rows.empty:
        return None
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["collective", "world_size", "size_mib"],
        keep=["collective", "world_size", "size_mib"],
        without=UNUSED,
        metrics=[
            time_column("collective", "latency (ms)"),
            Column(key="algorithm_gb_s", header="algorithm bandwidth (GB/s)", format=fmt.number),
            Column(key="bus_gb_s", header="bus bandwidth (GB/s)", format=fmt.number),
            Column(key="wrong_elements", header="wrong", format=fmt.integer),
        ],
    )


@finding("distributed_communication")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["bus_gb_s"].notna()]
    if known.empty:
        return None
    smallest = known[known["size_mib"] == known["size_mib"].min()]
    wrong = int(rows["wrong_elements"].fillna(0).sum())
    return sentence(
        say_bandwidths(known),
        f"latencies of {smallest['size_mib'].iloc[0]:,g} MiB are "
        f"{span(smallest['collective_median_ms'], fmt.number)} ms over operations and ranks",
        f"{fmt.integer(wrong)} elements were wrong" if wrong else "no element was wrong",
    )
