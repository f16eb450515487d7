"""CS336 problem benchmarking_script: mean and spread of every phase of a step, per model."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import percent_span, say_out_of_memory, sentence, span

CAPTION = (
    "Mean ± sample standard deviation, and median, of the phases of a training step. TFLOP/s "
    "per device by the model's FLOP formula; MFU divides it by the dense peak of the precision."
)

PHASES = ("forward", "backward", "optimizer", "step")


@table("benchmarking_script")
def build(frame: pd.DataFrame) -> Table | None:
    steps = of_task(frame, "train_step")
    if steps.empty:
        return None
    rows = per_case(
        steps,
        phases=PHASES,
        values=("mean_ms", "std_ms", "median_ms", "tokens_per_s", "tflops", "mfu"),
    )
    starts = rows["slow_start"].astype(bool).map({True: fmt.SECTION, False: ""})
    metrics = []
    for phase in PHASES:
        rows[f"{phase}_mean_mark"] = rows[f"{phase}_mark"] + starts
        for kind in ("disturbed", "impossible"):
            rows[f"{phase}_mean_{kind}"] = rows[f"{phase}_{kind}"]
        metrics += [
            Column(
                key=f"{phase}_mean_ms",
                header="mean (ms)",
                group=phase,
                format=fmt.number,
                spread=f"{phase}_std_ms",
                status=f"{phase}_status",
                mark=f"{phase}_mean_mark",
            ),
            Column(
                key=f"{phase}_median_ms",
                header="median (ms)",
                group=phase,
                format=fmt.number,
                mark=f"{phase}_mark",
                iqr=f"{phase}_iqr_ms",
            ),
        ]
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "attention", "precision", "mode"],
        keep=["model"],
        metrics=[
            *metrics,
            Column(key="step_tokens_per_s", header="tokens/s", format=fmt.number),
            Column(key="step_tflops", header="TFLOP/s", format=fmt.number, detail=True),
            Column(key="step_mfu", header="MFU (%)", format=fmt.percent),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
        ],
    )


@finding("benchmarking_script")
def say(rows: pd.DataFrame) -> str | None:
    ratio = (rows["backward_median_ms"] / rows["forward_median_ms"]).dropna()
    spread = (rows["step_std_ms"] / rows["step_mean_ms"]).dropna()
    used = rows["step_mfu"].dropna()
    return sentence(
        f"the backward pass takes {span(ratio)} the forward pass" if len(ratio) else None,
        f"a step's standard deviation is {percent_span([spread.median()])} of its mean (median)"
        if len(spread)
        else None,
        f"MFU is {percent_span(used)}" if len(used) else None,
        say_out_of_memory(rows),
    )
