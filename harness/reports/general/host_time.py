"""The host's and the device's time side by side, for every phase measured on a GPU."""

from __future__ import annotations

import pandas as pd

from harness.analysis.host_time import NOTICEABLE_WAIT, host_bound
from harness.cases import format as fmt
from harness.cases.columns import point_groups
from harness.render.rows import marks_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import percent_span, sentence

CAPTION = (
    "The host's time to enqueue a pass (first quartile) beside the pass itself, and the same pass "
    "on the device alone, enqueued whole before the device began (medians). Waits: the share of "
    f"the pass in which the device waited for its host; over {100 * NOTICEABLE_WAIT:.0f}% the pass "
    "is host-bound."
)

AS_GRAPHS = (
    "Host-bound passes of attention and of decoding: task.cuda_graph=true measures the same cases "
    "as CUDA graphs, which the host launches at once."
)


@table("host_time", default=85)
def build(frame: pd.DataFrame) -> Table | None:
    rows = frame[(frame["status"] == "ok") & frame["host_ms"].notna()].copy()
    if rows.empty:
        return None
    rows["mark"] = marks_of(rows)
    rows["graph_ms"] = _as_graph(rows)
    rows["bound"] = host_bound(rows).map({True: "host", False: "device"})
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "head_dim", "seq_len", "attention"],
        keep=["attention"],
        metrics=[
            Column(key="phase", header="phase"),
            Column(
                key="median_ms",
                header="pass (ms)",
                format=fmt.number,
                mark="mark",
                iqr="iqr_ms",
            ),
            Column(key="device_ms", header="device (ms)", format=fmt.number),
            Column(key="host_ms", header="host (ms)", format=fmt.number),
            Column(key="device_waits", header="waits (%)", format=fmt.rough_percent),
            Column(key="bound", header="bound by"),
            Column(key="graph_ms", header="as CUDA graph (ms)", format=fmt.number),
        ],
    )
    built.is_listing = True
    if _without_graph(rows).any():
        built.footnotes.append(AS_GRAPHS)
    return built


@finding("host_time")
def say(rows: pd.DataFrame) -> str | None:
    bound = rows[host_bound(rows)]
    if bound.empty:
        return sentence(f"no pass is host-bound, of {fmt.integer(len(rows))}")
    waits = bound["device_waits"].dropna()
    share = f", in which the device waits for {percent_span(waits)}" if len(waits) else ""
    return sentence(f"{len(bound)} of {len(rows)} passes are host-bound{share}")


def _as_graph(rows: pd.DataFrame) -> pd.Series:
    """The time of each launched row's case as a CUDA graph, where that was measured too."""
    group = point_groups(rows, ["cuda_graph"])
    pairs = pd.MultiIndex.from_arrays([group, rows["phase"]])
    graphed = rows["cuda_graph"].astype(bool).to_numpy()
    times = pd.Series(rows["median_ms"].to_numpy(), index=pairs)[graphed]
    found = times[~times.index.duplicated()].reindex(pairs)
    return pd.Series(found.to_numpy(), index=rows.index).where(~graphed)


def _without_graph(rows: pd.DataFrame) -> pd.Series:
    """The host-bound rows of tasks that have CUDA graphs, whose graph was not measured."""
    able = rows["task"].isin(["attention", "decode"]) & (rows["world_size"] == 1)
    return able & host_bound(rows) & ~rows["cuda_graph"].astype(bool) & rows["graph_ms"].isna()
