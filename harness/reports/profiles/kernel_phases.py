"""How long each phase takes with and without a profiler, and for how much of it kernels run.

Question (a) of the CS336 text's problem nsys_profile, and the check of the profile itself.
"""

from __future__ import annotations

import pandas as pd

from harness.analysis.physics import OVER_PASS
from harness.cases import format as fmt
from harness.render.kernel_rows import UNUSED, phases_of, profiled
from harness.render.rows import marks_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import listed, percent_span, sentence

CAPTION = (
    "Median time of each phase without a profiler, and its time under the profiler, on a device "
    "from the end of what ran before to the end of its last kernel; all kernels together, and "
    "their share of the unprofiled time; the share of the profiled time in which none ran; kernels "
    "launched. On a CPU kernels are operators, each "
    "without those that it calls. Means per step and rank."
)


@table("kernel_phases", default=120)
def build(frame: pd.DataFrame) -> Table | None:
    rows = profiled(frame)
    rows = rows[
        [
            phase in phases_of(profile)
            for phase, profile in zip(rows["phase"], rows["kernel_profile"], strict=True)
        ]
    ]
    if rows.empty:
        return None
    found = pd.DataFrame(
        [
            profile["phases"][phase]
            for phase, profile in zip(rows["phase"], rows["kernel_profile"], strict=True)
        ],
        index=rows.index,
    )
    rows = rows.join(found)
    measured = rows["median_ms"]
    rows["overhead"] = rows["wall_ms"] / measured - 1
    rows["kernel_share"] = rows["kernel_ms"] / measured
    rows["idle"] = 1 - rows["busy_ms"] / rows["wall_ms"]
    rows["mark"] = marks_of(rows)
    slowed = (rows["kernel_share"] > OVER_PASS).tolist()
    rows["kernels_impossible"] = [["kernels"] if is_so else [] for is_so in slowed]
    rows["kernels_mark"] = [fmt.CIRCLED_SLASH if is_so else "" for is_so in slowed]
    rows.loc[slowed, "kernel_share"] = float("nan")
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "seq_len"],
        keep=["model"],
        without=UNUSED,
        metrics=[
            Column(key="phase", header="phase"),
            Column(
                key="median_ms",
                header="unprofiled (ms)",
                format=fmt.number,
                mark="mark",
                iqr="iqr_ms",
            ),
            Column(key="wall_ms", header="profiled (ms)", format=fmt.number),
            Column(key="overhead", header="overhead (%)", format=fmt.percent),
            Column(key="kernel_ms", header="kernels (ms)", format=fmt.number, mark="kernels_mark"),
            Column(key="kernel_share", header="of it (%)", format=fmt.percent),
            Column(key="idle", header="idle (%)", format=fmt.percent),
            Column(key="launches", header="launches", format=fmt.integer),
        ],
    )


@finding("kernel_phases")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["idle"].notna()]
    if known.empty:
        return None
    shares = known["idle"].clip(lower=0).groupby(known["phase"], sort=False)
    words = [f"{percent_span(part)} of {phase}" for phase, part in shares]
    without = rows.loc[rows["kernel_share"] <= 1, "kernel_share"]
    return sentence(
        f"under the profiler the device is idle for {listed(words)}",
        f"kernels fill {percent_span(without)} of the unprofiled time of "
        f"{_all_of(len(without), len(rows))} phases"
        if len(without)
        else None,
    )


def _all_of(count: int, total: int) -> str:
    return f"all {total}" if count == total else f"{count} of {total}"
