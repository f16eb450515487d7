"""Training steps captured in CUDA graphs, beside launched ones and torch.compile's own graphs."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import POINTS
from harness.cases.compilation import CUDA_GRAPH_MODES
from harness.render.rows import of_task, per_case, speedup_over, verdict_over
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.training.ways import WAYS
from harness.sentences.findings import percent_span, sentence, told

CAPTION = (
    "Training steps launched from Python, compiled, and captured: forward pass, backward pass and "
    "optimizer are a CUDA graph each. Host: its time to launch a step (first quartile). Speed-up: "
    "of the whole step over the one that is launched and not compiled, and over the fastest with "
    "torch.compile's CUDA graphs (reduce-overhead), which leave the optimizer to the host."
)


@table("captured_steps", default=92)
def build(frame: pd.DataFrame) -> Table | None:
    rows = per_case(
        of_task(frame, "train_step"),
        phases=("forward", "backward", "optimizer", "step"),
        values=("median_ms", "host_ms", "device_waits"),
    )
    # The fastest first, which is the baseline where there are several.
    rows = rows.sort_values("step_median_ms", kind="stable", ignore_index=True)
    captured = rows["cuda_graph"].astype(bool)
    if not captured.any():
        return None
    baselines = {
        "launched": ~captured & (rows["compile_scope"] == POINTS["compile_scope"].baseline),
        "compiled": ~captured & rows["compile_mode"].isin(CUDA_GRAPH_MODES),
    }
    for name, is_baseline in baselines.items():
        rows[f"{name}_speedup"] = speedup_over(rows, "step_median_ms", WAYS, is_baseline)
        rows[f"{name}_verdict"] = verdict_over(rows, "step_evidence", WAYS, is_baseline)
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "attention", "strategy", "batch_size", "seq_len", *WAYS],
        keep=["cuda_graph"],
        metrics=[
            time_column("forward", "forward (ms)", detail=True),
            time_column("backward", "backward (ms)", detail=True),
            time_column("optimizer", "optimizer (ms)", detail=True),
            time_column("step", "step (ms)"),
            Column(key="step_host_ms", header="host (ms)", format=fmt.number),
            Column(key="step_device_waits", header="waits (%)", format=fmt.rough_percent),
            Column(
                key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number, detail=True
            ),
            Column(
                key="launched_speedup", header="over launched", format=fmt.factor, group="speed-up"
            ),
            Column(
                key="compiled_speedup",
                header="over compiled graphs",
                format=fmt.factor,
                group="speed-up",
            ),
        ],
    )


@finding("captured_steps")
def say(rows: pd.DataFrame) -> str | None:
    captured = rows[rows["cuda_graph"].astype(bool)]
    parts = []
    for name, other in (("launched", "launched ones"), ("compiled", "torch.compile's graphs")):
        known = captured[captured[f"{name}_speedup"].notna()]
        ratios = 1 / told(known, f"{name}_speedup", f"{name}_verdict")[f"{name}_speedup"]
        if len(ratios):
            count = "" if len(ratios) == len(known) else f"{len(ratios)} of {len(known)} "
            parts.append(
                f"{count}captured steps take {percent_span(ratios)} of the time of {other}"
            )
        elif len(known):
            parts.append(f"no verdict tells captured steps from {other}")
    return sentence(*parts)
