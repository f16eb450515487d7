"""CS336 problem torch_compile: what compiling attention, or the model, gains and costs."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import POINTS
from harness.render.rows import of_task, per_case, speedup_over, verdict_over
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import sentence, span, told

CAPTION = (
    "Compiled against uncompiled: median times, and the speed-up over the same point without "
    "torch.compile (for attention alone, over naive attention). Compile time is the first pass "
    "beyond a later one, and is in no other column."
)

PHASES = ("forward", "backward", "optimizer", "step")


@table("torch_compile")
def build(frame: pd.DataFrame) -> Table | None:
    rows = per_case(frame, phases=PHASES)
    whole = ~_alone(rows)
    uncompiled = whole & (rows["compile_scope"] == POINTS["compile_scope"].baseline)
    naive = ~whole & (rows["attention"] == POINTS["attention"].baseline)
    # A whole step is not the sum of its phases' medians, so each has a speed-up of its own.
    for phase in ("forward", "backward", "step"):
        value = f"{phase}_median_ms"
        compiled = speedup_over(rows, value, ["compile_scope", "compile_mode"], uncompiled)
        backend = speedup_over(rows, value, ["attention"], naive)
        rows[f"{phase}_speedup"] = compiled.where(whole, backend)
        key = f"{phase}_evidence"
        of_compiled = verdict_over(rows, key, ["compile_scope", "compile_mode"], uncompiled)
        of_backend = verdict_over(rows, key, ["attention"], naive)
        rows[f"{phase}_verdict"] = of_compiled.where(whole, of_backend)
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "head_dim", "seq_len", "attention", "compile_scope", "compile_mode"],
        keep=["compile_scope"] if whole.any() else ["attention"],
        order=[
            *("task", "model", "mode", "precision", "head_dim", "seq_len", "batch_size"),
            *("attention", "compile_scope", "compile_mode"),
        ],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            time_column("optimizer", "optimizer (ms)"),
            time_column("step", "step (ms)"),
            *(
                Column(key=f"{phase}_speedup", header=phase, group="speed-up", format=fmt.factor)
                for phase in ("forward", "backward", "step")
            ),
            Column(key="compile_s", header="compile (s)", format=fmt.number),
            Column(key="recompilations", header="recompilations", format=fmt.integer, detail=True),
        ],
    )


@finding("torch_compile")
def say(rows: pd.DataFrame) -> str | None:
    parts = []
    alone = _alone(rows) & (rows["attention"] != POINTS["attention"].baseline)
    for name, part in rows[alone].groupby("attention"):
        gains = told(part, "forward_speedup", "forward_verdict")["forward_speedup"]
        if len(gains):
            parts.append(f"{name} attention alone is {span(gains)} as fast as naive forward")
    compiled = ~_alone(rows) & (rows["compile_scope"] != POINTS["compile_scope"].baseline)
    for scope, part in rows[compiled].groupby("compile_scope"):
        phase = "forward" if part["step_speedup"].isna().all() else "step"
        gains = told(part, f"{phase}_speedup", f"{phase}_verdict")[f"{phase}_speedup"]
        if len(gains):
            words = {"forward": "forward pass", "step": "step"}[phase]
            parts.append(f"compiling the {scope} makes the {words} {span(gains)} as fast")
    return sentence(*parts)


def _alone(rows: pd.DataFrame) -> pd.Series:
    """Whether a row is of attention alone, rather than of a whole step."""
    return pd.Series(rows.index.isin(of_task(rows, "attention").index), index=rows.index)
