"""How evenly each layout spreads the FLOPs of causal attention, by three counts."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.context.balance_rows import COUNT_WORDS, COUNTS_EXPLAINED, counted
from harness.sentences.findings import by_name, listed, sentence, span

CAPTION = (
    "FLOPs of a causal forward pass per rank, and how uneven they are. "
    f"{COUNTS_EXPLAINED} Lockstep cost: the sum over ring steps of the busiest rank's, relative to "
    "a perfect split; 1 costs nothing."
)

POINT_COLUMNS = ("num_heads", "head_dim", "window", "prefix_len", "seq_len", "ranks", "split")


@table("flop_balance")
def build(frame: pd.DataFrame) -> Table | None:
    rows = counted(frame)
    if rows.empty:
        return None
    columns = []
    for count, words in COUNT_WORDS.items():
        per_rank = [balance.per_rank(count) for balance in rows["counts"]]
        rows[f"{count}_min"] = [min(flops) / 1e9 for flops in per_rank]
        rows[f"{count}_max"] = [max(flops) / 1e9 for flops in per_rank]
        rows[f"{count}_ratio"] = rows[f"{count}_max"] / rows[f"{count}_min"]
        rows[f"{count}_over_mean"] = [max(x) / (sum(x) / len(x)) for x in per_rank]
        columns += [
            Column(
                key=f"{count}_min", header="min (GFLOP)", format=gflop, group=words, detail=True
            ),
            Column(key=f"{count}_max", header="max (GFLOP)", format=gflop, group=words),
            Column(key=f"{count}_ratio", header="max/min", format=fmt.factor, group=words),
            Column(
                key=f"{count}_over_mean",
                header="max/mean",
                format=fmt.factor,
                group=words,
                detail=True,
            ),
        ]
    for count in ("pair", "tile"):
        rows[f"{count}_lockstep"] = [balance.lockstep_cost(count) for balance in rows["counts"]]
        header = f"lockstep cost {COUNT_WORDS[count]}"
        columns.append(Column(key=f"{count}_lockstep", header=header, format=_three_decimals))
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=POINT_COLUMNS,
        keep=["split"],
        metrics=columns,
        without=UNUSED,
    )


@finding("flop_balance")
def say(rows: pd.DataFrame) -> str | None:
    over = [
        (span(part["pair_over_mean"]), str(name))
        for name, part in rows.groupby("split", sort=False)
    ]
    cost = rows["pair_lockstep"].groupby(rows["split"]).mean()
    costs = cost.map(fmt.factor)
    least = fmt.factor(cost.min())
    names = [str(name) for name in cost.index[costs == least]]
    return sentence(
        f"the busiest rank computes {by_name(over, 'the mean')}",
        f"in lockstep {listed(names)} cost{'s' if len(names) == 1 else ''} least, {least} a "
        "perfect split"
        if len(cost) > 1
        else None,
    )


UNUSED = ("attention", "precision", "batch_size", "num_kv_heads", "device", "device_name", "mode")
"""Points that counting has no use for."""


def gflop(value: float) -> str:
    """One digit after the point, as in the guide's table."""
    return f"{value:,.1f}"


def _three_decimals(value: float) -> str:
    return f"{value:.3f}"
