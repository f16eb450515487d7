"""CS336 problem benchmarking_script (c): what is measured when the warm-up is too short."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import marks_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import sentence, span

CAPTION = (
    "Time of one step by the number of warm-up steps before the measurement. Without warm-up the "
    "first samples carry one-time costs, which the mean keeps and the median forgets."
)

HEADLINE_PHASES = ("step", "forward_backward", "forward")
"""The most complete phase of a task is the one whose warm-up is looked at."""


@table("warmup_effect")
def build(frame: pd.DataFrame) -> Table | None:
    rows = headline(frame)
    if rows.empty:
        return None
    rows["first_ms"] = [samples[0] if samples else float("nan") for samples in rows["samples_ms"]]
    rows["first_over_median"] = rows["first_ms"] / rows["median_ms"]
    rows["mark"] = marks_of(rows)
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "attention", "precision", "warmup_steps"],
        keep=["warmup_steps"],
        order=["task", "model", "attention", "precision", "mode", "seq_len", "warmup_steps"],
        metrics=[
            _column("mean_ms", "mean (ms)"),
            _column("std_ms", "std (ms)"),
            replace(_column("median_ms", "median (ms)"), iqr="iqr_ms"),
            _column("first_ms", "first sample (ms)"),
            Column(key="first_over_median", header="first/median", format=fmt.factor),
        ],
    )


@finding("warmup_effect")
def say(rows: pd.DataFrame) -> str | None:
    known = (rows["mean_ms"] / rows["median_ms"]).dropna()
    if known.empty:
        return None
    steps = rows.loc[known.index, "warmup_steps"].astype(int)
    ratio = known.groupby(steps).max()
    least = int(ratio.index[0])
    enough = ratio.index[(ratio <= 1.05)[::-1].cummin()[::-1]]
    return sentence(
        f"with {least} warm-up steps the mean is {span(known[steps == least])} the median",
        f"from {int(enough[0])} on they agree within 5%" if len(enough) else None,
    )


def headline(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of each case's most complete phase; none of a case that is never timed."""
    untimed = (frame["status"] == "ok") & (frame["num_samples"] == 0)
    rows = frame[frame["phase"].isin(HEADLINE_PHASES) & ~untimed]
    place = rows["phase"].map({phase: index for index, phase in enumerate(HEADLINE_PHASES)})
    chosen = place.groupby(rows["case_id"]).transform("min")
    return rows[place == chosen].copy()


def _column(key: str, header: str) -> Column:
    return Column(key=key, header=header, format=fmt.number, status="status", mark="mark")
