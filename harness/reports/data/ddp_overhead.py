"""Time that buckets add to a step: the text's model, with measured o and w, and measured."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.data.step_rows import UNUSED, bucketed
from harness.sentences.findings import best_row, sentence, span
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Overhead of bucketed data parallelism: n_b o + s / (n_b w) with o and w fitted to the "
    "all-reduces measured on as many ranks, n_b the buckets that the model's parameters fill; the "
    "size sqrt(s w o) that the model calls best. The model takes computing a bucket's gradients to "
    "last as long as sending them, so that no call's o hides. Queue: what is left where a bucket "
    "leaves once its gradients are there and the one before has arrived, with the backward pass as "
    "long as it was. Measured: the time after backward until gradients are averages, and in a "
    "trace what did not hide behind computing."
)


@table("ddp_overhead")
def build(frame: pd.DataFrame) -> Table | None:
    rows = bucketed(frame)
    if rows.empty:
        return None
    rows = rows.sort_values("bucket_mib", kind="stable")
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "world_size", "precision"],
        keep=["strategy"],
        without=UNUSED,
        metrics=[
            Column(key="bucket_mib", header="bucket (MiB)", format=fmt.number),
            Column(key="buckets", header="n_b", format=fmt.integer, detail=True),
            Column(key="overhead_us", header="o (us)", format=fmt.number, detail=True),
            Column(key="link_gb_s", header="w (GB/s)", format=fmt.number, detail=True),
            Column(key="best_mib", header="best bucket (MiB)", format=fmt.number, detail=True),
            Column(key="transfers_ms", header="all transfers (ms)", format=fmt.number, detail=True),
            time_column("backward", "backward (ms)"),
            Column(key="last_mib", header="last bucket (MiB)", format=fmt.number, detail=True),
            Column(key="model_ms", header="model (ms)", format=fmt.number),
            Column(key="queue_ms", header="queue (ms)", format=fmt.number),
            Column(
                key="communication_median_ms",
                header="after backward (ms)",
                format=fmt.number,
                mark="communication_mark",
                iqr="communication_iqr_ms",
            ),
            Column(
                key="exposed_ms",
                header="exposed in trace (ms)",
                format=fmt.number,
                mark="traced_mark",
            ),
            time_column("step", "step (ms)"),
        ],
    )


@finding("ddp_overhead")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["communication_median_ms"].notna()]
    if known.empty:
        return None
    modelled = known["best_mib"].dropna()
    return sentence(
        say_least_left(known),
        f"the model's best bucket is {span(modelled, fmt.number)} MiB" if len(modelled) else None,
        _say_why_less(known),
    )


def _say_why_less(rows: pd.DataFrame) -> str | None:
    """Why less is left than the model says, of the row where the two differ most.

    None where nothing is, where transfers outlast the backward pass, and of disturbed times.
    """
    sound = rows["communication_mark"].fillna("") == ""
    hidden = rows["transfers_ms"] < rows["backward_median_ms"]
    over = rows[sound & hidden & (rows["model_ms"] > rows["communication_median_ms"])]
    if over.empty:
        return None
    row = best_row(over.assign(ratio=over["model_ms"] / over["communication_median_ms"]), "ratio")
    words = {
        name: fmt.number(row[name])
        for name in (
            *("bucket_mib", "model_ms", "communication_median_ms", "transfers_ms"),
            *("backward_median_ms", "last_mib", "queue_ms"),
        )
    }
    return (
        "with buckets of {bucket_mib} MiB the model says {model_ms} ms and "
        "{communication_median_ms} are measured: it takes computing to last as long as sending, "
        "but backward takes {backward_median_ms} ms and all transfers {transfers_ms}, so that "
        "calls' overheads hide too and only the last bucket ({last_mib} MiB) is left, "
        "{queue_ms} ms by a queue"
    ).format(**words)


def say_least_left(rows: pd.DataFrame) -> str:
    """Which size of buckets leaves least after the backward pass, or how much all of them do."""
    said = say_fastest(
        rows,
        "communication_median_ms",
        ("strategy", "bucket_mib"),
        word="first to be done after the backward pass",
        name=lambda row: f"the bucket of {fmt.number(row['bucket_mib'])} MiB",
    )
    left = f"{span(rows['communication_median_ms'], fmt.number)} ms are left after it"
    return f"{said}; {left}" if said else left.replace("it", "the backward pass")
