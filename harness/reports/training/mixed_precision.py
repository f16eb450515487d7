"""CS336 problem benchmarking_mixed_precision: full against mixed precision, side by side."""

from __future__ import annotations

import pandas as pd

from harness.analysis.evidence import words_between
from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups, sorted_values
from harness.render.rows import per_case
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import listed, sentence, span

CAPTION = (
    "Median times of the forward and backward pass by precision; speed-up of both together "
    "over full float32 at the same point."
)

VARIED = ("precision", "compute", "tf32")


@table("mixed_precision")
def build(frame: pd.DataFrame) -> Table | None:
    cases = per_case(frame, phases=("forward", "backward", "step"))
    if cases.empty:
        return None
    cases["both_ms"] = cases["forward_median_ms"] + cases["backward_median_ms"].fillna(0.0)
    cases.loc[cases["backward_status"].eq("ok") & cases["backward_median_ms"].isna(), "both_ms"] = (
        float("nan")
    )
    group = point_groups(cases, VARIED)
    names = [name for name in POINTS if name != "precision" and name in cases]
    rows = cases.assign(group=group).drop_duplicates("group").set_index("group")[names]
    full = cases["compute"].eq("float32") & ~cases["tf32"] & cases["precision"].eq("fp32")
    baseline = cases[full].groupby(group[full])["both_ms"].first()
    metrics: list[Column] = []
    for precision in sorted_values(cases, "precision"):
        chosen = cases["precision"] == precision
        part = cases[chosen].groupby(group[chosen]).first().reindex(rows.index)
        for phase in ("forward", "backward"):
            rows[f"{precision}_{phase}_ms"] = part[f"{phase}_median_ms"]
            for value in ("status", "iqr_ms", "disturbed", "impossible"):
                rows[f"{precision}_{phase}_{value}"] = part[f"{phase}_{value}"]
            rows[f"{precision}_{phase}_mark"] = part[f"{phase}_mark"].fillna("")
            metrics.append(
                Column(
                    key=f"{precision}_{phase}_ms",
                    header=f"{phase} (ms)",
                    group=precision,
                    format=fmt.number,
                    status=f"{precision}_{phase}_status",
                    mark=f"{precision}_{phase}_mark",
                    iqr=f"{precision}_{phase}_iqr_ms",
                    record=f"{precision}_case_id",
                )
            )
        rows[f"{precision}_case_id"] = part["case_id"]
        rows[f"{precision}_step_ms"] = part["step_median_ms"]
        rows[f"{precision}_step_mark"] = part["step_mark"].fillna("")
        metrics.append(
            Column(
                key=f"{precision}_step_ms",
                header="step (ms)",
                group=precision,
                format=fmt.number,
                mark=f"{precision}_step_mark",
                record=f"{precision}_case_id",
                detail=True,
            )
        )
        if precision != "fp32":
            rows[f"{precision}_speedup"] = baseline.reindex(rows.index) / part["both_ms"]
            for phase in ("forward", "backward"):
                proof = cases[full].groupby(group[full])[f"{phase}_evidence"].first()
                rows[f"{precision}_{phase}_verdict"] = words_between(
                    proof.reindex(rows.index).tolist(), part[f"{phase}_evidence"].tolist()
                )
            metrics.append(
                Column(
                    key=f"{precision}_speedup",
                    header="speed-up",
                    group=precision,
                    format=fmt.factor,
                    record=f"{precision}_case_id",
                )
            )
    return make_table(
        caption=CAPTION,
        rows=rows.reset_index(drop=True),
        lead=["model", "attention"],
        keep=["model"],
        without=["precision"],
        metrics=metrics,
    )


@finding("mixed_precision")
def say(rows: pd.DataFrame) -> str | None:
    words = []
    for column in rows.columns:
        name = str(column).removesuffix("_speedup")
        if name == str(column) or rows[column].isna().all():
            continue
        known = rows[rows[column].notna() & _are_told(rows, name)]
        if len(known):
            words.append(f"{name} is {span(known[column])} as fast as fp32")
    return sentence(listed(words)) if words else None


def _are_told(rows: pd.DataFrame, precision: str) -> pd.Series:
    """Whether verdicts tell how the times that the speed-up adds up compare with those of fp32."""
    clear = ["FASTER", "SLOWER", "SAME"]
    forward, backward = (
        rows[f"{precision}_{phase}_verdict"].isin(clear) for phase in ("forward", "backward")
    )
    return forward & (backward | rows[f"{precision}_backward_ms"].isna())
