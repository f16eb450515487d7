"""Activation checkpointing: memory saved and time added."""

from __future__ import annotations

import pandas as pd

from harness.analysis.case_columns import GIB
from harness.analysis.evidence import is_host_bound
from harness.cases import format as fmt
from harness.cases.columns import point_groups
from harness.render.predicted_memory import predicted_columns
from harness.render.rows import of_task, per_case, verdict_over
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import sentence, span, told

CAPTION = (
    "Median time of a training step and its peak memory, without checkpointing and with it; "
    "ratios to the case without. Memory is what tensors held at once, by the memory profile where "
    "there is one; predicted by formula."
)


@table("checkpointing", default=110)
def build(frame: pd.DataFrame) -> Table | None:
    frame = of_task(frame, "train_step")
    if not (frame["checkpoint"] != "none").any():
        return None
    rows = per_case(frame, phases=("forward", "backward", "step"))
    rows["peak_gib"] = [
        profile["peak_bytes"] / GIB if isinstance(profile, dict) else peak
        for profile, peak in zip(rows["memory_profile"], rows["peak_memory_gib"], strict=True)
    ]
    ratio = rows["predicted_memory_gib"] / rows["peak_gib"]
    rows["predicted_over_measured"] = ratio.where(
        rows["memory_profile"].notna(), rows["predicted_over_measured"]
    )
    unknown = rows["status"] != "ok"
    if rows["memory_profile"].notna().any():
        # Growth of the resident set beside what tensors hold would compare two things.
        unknown |= rows["memory_profile"].isna()
    rows.loc[unknown, "peak_gib"] = float("nan")
    group = point_groups(rows, ["checkpoint"])
    rows = rows[group.isin(group[rows["checkpoint"] != "none"])]
    group = group[rows.index]
    without = rows["checkpoint"] == "none"
    for name, value in (("time", "step_median_ms"), ("memory", "peak_gib")):
        baseline = group.map(rows.loc[without, value].groupby(group[without]).first())
        rows[f"{name}_ratio"] = rows[value] / baseline
    rows["verdict"] = verdict_over(rows, "step_evidence", ["checkpoint"], without)
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "seq_len", "attention", "checkpoint"],
        keep=["checkpoint"],
        without=("profile",),
        order=["model", "precision", "batch_size", "seq_len", "attention", "checkpoint"],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            time_column("step", "step (ms)"),
            Column(key="time_ratio", header="time", format=fmt.factor),
            *predicted_columns(rows, group="peak memory (GiB)"),
            Column(key="peak_gib", header="measured", format=fmt.number, group="peak memory (GiB)"),
            Column(key="memory_ratio", header="memory", format=fmt.factor),
        ],
    )


@finding("checkpointing")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[(rows["checkpoint"] != "none") & rows["memory_ratio"].notna()]
    if known.empty:
        return None
    # What computing again costs is not told by a host that takes longer to ask for it.
    host_bound = rows["step_evidence"].map(is_host_bound).astype(bool)
    parts = []
    for name, part in known.groupby(known["checkpoint"].astype(str), sort=False):
        # As it is chosen: rows of every second block are called so in the table.
        key = f"every_k ({name})" if str(name).startswith("every ") else str(name)
        words = f"checkpoint={key} needs {span(part['memory_ratio'])} the memory of none"
        times = told(part[~host_bound[part.index]], "time_ratio", "verdict")
        if len(times):
            words += f" and {span(times['time_ratio'])} its time"
            words += "" if len(times) == len(part) else f" (told for {len(times)} of {len(part)})"
        parts.append(words)
    return sentence(*parts)
