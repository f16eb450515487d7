"""Sharding of optimizer state: memory at three moments and by content, and step time."""

from __future__ import annotations

import pandas as pd

from harness.analysis.case_columns import GIB
from harness.cases import format as fmt
from harness.render.predicted_memory import predicted_columns
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.data.data_parallel import ratio
from harness.reports.data.step_rows import UNUSED, footprint_of, on_ranks, rank_gib
from harness.sentences.findings import best_row, sentence

CAPTION = (
    "Memory of the fullest rank in GiB: after initialisation, before the first optimizer step and "
    "after it; what tensors hold, counted, and below in brackets by formula; the peak of later "
    "steps; median time of a step, and over that of PyTorch's DDP."
)

MOMENTS = {
    "after_initialisation": "after initialisation",
    "before_optimizer": "before optimizer step",
    "after_optimizer": "after optimizer step",
}

PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
}


@table("optimizer_state_sharding")
def build(frame: pd.DataFrame) -> Table | None:
    rows = on_ranks(frame)
    if rows.empty:
        return None
    ok = rows["status"] == "ok"
    for name in (*MOMENTS, *PARTS):
        values = [rank_gib(memory, f"{name}_bytes") for memory in rows["rank_memory"]]
        rows[name] = pd.Series(values, index=rows.index).where(ok)
    rows["held"] = rows[list(PARTS)].sum(axis=1, min_count=1)
    prints = [footprint_of(case) for case in rows["case"]]
    for name in PARTS:
        rows[f"{name}_formula"] = [
            float("nan") if found is None else getattr(found, name) / GIB for found in prints
        ]
        pairs = zip(rows[name], rows[f"{name}_formula"], strict=True)
        rows[f"{name}_both"] = [
            None if value != value else f"{fmt.number(value)} ({fmt.number(formula)})"
            for value, formula in pairs
        ]
    built = make_table(
        caption=CAPTION.replace("and below in brackets", "in brackets"),
        rows=rows,
        lead=["model", "world_size", "precision", "strategy"],
        keep=["strategy"],
        without=UNUSED,
        metrics=[
            *(Column(key=key, header=words, format=fmt.number) for key, words in MOMENTS.items()),
            *(
                Column(
                    key=f"{key}_both",
                    header=words,
                    group="holds",
                    raw=(key, f"{key}_formula"),
                    detail=True,
                )
                for key, words in PARTS.items()
            ),
            Column(key="held", header="together", group="holds", format=fmt.number, detail=True),
            *predicted_columns(rows, group="peak"),
            Column(key="peak_memory_gib", header="measured", format=fmt.number, group="peak"),
            time_column("step", "step (ms)"),
            Column(key="over_peer", header="over DDP", format=ratio, mark="over_mark"),
        ],
    )
    if (rows["device"] == "cpu").any():
        built.footnotes.append(
            "On a CPU the three moments are sums of the tensors of parameters, gradients and "
            "optimizer state; buffers for gradients count once a gradient is in them."
        )
    return built


@finding("optimizer_state_sharding")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["after_initialisation"].notna()]
    if known.empty:
        return None
    last = "after_optimizer" if known["after_optimizer"].notna().any() else "before_optimizer"
    if known[last].isna().all():
        return None
    least, most = (best_row(known, last, highest=high) for high in (False, True))
    return sentence(
        f"{least['strategy']} holds least after the first step, {fmt.number(least[last])} GiB, "
        f"where {most['strategy']} holds {fmt.number(most[last])}"
    )
