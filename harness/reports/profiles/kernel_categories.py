"""Kernel time by category and phase: problem nsys_profile (c) and (d) of the CS336 text."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.profilers.kernels.categories import CATEGORIES
from harness.render.kernel_rows import (
    UNUSED,
    by_category,
    passes,
    phases_of,
    profiled,
    rows_of,
    total_ms,
)
from harness.render.rows import cases_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import percent_span, sentence

CAPTION = (
    "Shares of kernel time by what kernels do (%): matmul of a forward phase against that of the "
    "whole step is what training changes; attention is a fused kernel's softmax and matmuls "
    "together; all kernels of the optimizer's phase are its own."
)


@table("kernel_categories", default=130)
def build(frame: pd.DataFrame) -> Table | None:
    rows = []
    for case in cases_of(profiled(frame)):
        profile = case["kernel_profile"]
        for phase in phases_of(profile):
            kernels = rows_of(profile, phase)
            total = total_ms(kernels)
            if not total:
                continue
            shares = {f"{name}_share": ms / total for name, ms in by_category(kernels).items()}
            values = {"phase": phase, "kernel_ms": total / passes(profile), **shares}
            rows.append({**case, **values})
    if not rows:
        return None
    found = pd.DataFrame(rows)
    present = [name for name in CATEGORIES if f"{name}_share" in found]
    columns = [f"{name}_share" for name in present]
    found[columns] = found[columns].fillna(0.0)
    return make_table(
        caption=CAPTION,
        rows=found,
        lead=["model", "seq_len"],
        keep=["model"],
        without=UNUSED,
        metrics=[
            Column(key="phase", header="phase"),
            Column(key="kernel_ms", header="kernels (ms)", format=fmt.number),
            *(Column(key=f"{name}_share", header=name, format=fmt.percent) for name in present),
        ],
    )


@finding("kernel_categories")
def say(rows: pd.DataFrame) -> str | None:
    said = []
    for phase in ("forward", "step", "train_step"):
        mine = rows[rows["phase"] == phase]
        if "matmul_share" in mine and len(mine):
            said.append(f"{percent_span(mine['matmul_share'])} of {phase}")
    return sentence(f"matmuls take {' and '.join(said)}") if said else None
