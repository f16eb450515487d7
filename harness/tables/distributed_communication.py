"""What each collective operation costs by size and ranks, on gloo or NCCL."""

from __future__ import annotations

import pandas as pd

from harness import format as fmt
from harness.table import Column, Table, make_table, table, time_column
from harness.tables._collectives import UNUSED, collectives

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
