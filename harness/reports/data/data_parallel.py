"""Times of each data-parallel strategy beside PyTorch's DDP."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.predicted_memory import predicted_columns
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.data.step_rows import UNUSED, on_ranks
from harness.sentences.findings import percent_span, sentence
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Training steps whose ranks have batches of their own: median times of the slowest rank; the "
    "step over PyTorch's DDP's, with its interval over rounds (less is faster); after backward: "
    "from when a rank has its gradients until it has their averages, and its share of the step. "
    "From a trace, on the rank that computes longest: communication, the part of it that hides "
    "behind computing, and the share of the step that does not. Peak memory as predicted and "
    "measured."
)


@table("data_parallel")
def build(frame: pd.DataFrame) -> Table | None:
    rows = on_ranks(frame)
    if rows.empty:
        return None
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "world_size", "precision", "strategy"],
        keep=["strategy"],
        without=UNUSED,
        metrics=[
            time_column("step", "step (ms)"),
            Column(key="over_peer", header="over DDP", format=ratio, mark="over_mark"),
            Column(key="over_interval", header="interval", raw=("over_low", "over_high")),
            Column(
                key="communication_median_ms",
                header="(ms)",
                format=fmt.number,
                mark="communication_mark",
                group="after backward",
                iqr="communication_iqr_ms",
            ),
            Column(
                key="communication_share",
                header="(%)",
                format=fmt.percent,
                group="after backward",
            ),
            Column(
                key="traced_ms",
                header="communication (ms)",
                format=fmt.number,
                group="traced",
                mark="traced_mark",
                detail=True,
            ),
            Column(key="hidden_share", header="hidden (%)", format=fmt.percent, group="traced"),
            Column(key="exposed_share", header="exposed (%)", format=fmt.percent, group="traced"),
            Column(key="exposed_ranks", header="over ranks (%)", group="traced", detail=True),
            Column(key="step_tokens_per_s", header="tokens/s", format=fmt.number, detail=True),
            *predicted_columns(rows, header="predicted (GiB)", detail=True),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
        ],
    )
    if (rows["device"] == "cpu").any():
        built.footnotes.append(CPU_NOTE)
    return built


@finding("data_parallel")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["exposed_share"].notna() & ~rows["traced_impossible"].map(bool).astype(bool)]
    least = None
    if len(known):
        least = (
            f"communication that is not hidden is {percent_span(known['exposed_share'])} of a "
            "traced step"
        )
    return sentence(say_fastest(rows, "step_median_ms", ("strategy",)), _say_uncertain(rows), least)


def _say_uncertain(rows: pd.DataFrame) -> str | None:
    """How many steps the measurement cannot tell from those of PyTorch's DDP."""
    compared = rows[rows["over_verdict"].notna()]
    alike = compared[~compared["over_verdict"].isin(["FASTER", "SLOWER"])]
    if alike.empty:
        return None
    return f"{len(alike)} of {len(compared)} cannot be told from ddp_torch"


CPU_NOTE = (
    "On a CPU ranks share cores with each other and with the threads that communicate: what hides "
    "behind computing there slows it."
)


def ratio(value: float) -> str:
    """A ratio with three decimals, since strategies differ by a few percent."""
    return f"{value:.3f}{fmt.TIMES}"
