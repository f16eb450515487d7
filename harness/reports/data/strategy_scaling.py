"""Tokens per second of every strategy as ranks are added."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import point_groups
from harness.render.rows import of_task, per_case, unlike
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.data.data_parallel import ratio
from harness.reports.data.step_rows import UNUSED
from harness.sentences.findings import percent_span, say_unlike, sentence
from harness.sentences.leaders import say_fastest
from parallel import STRATEGIES

CAPTION = (
    "Training steps with as many sequences on every rank: median time of a step, tokens per "
    "second of all ranks together, and efficiency: tokens per second over those of one rank "
    "without a strategy times the ranks."
)

IMPLAUSIBLE = 1.1
"""Efficiency that no better use of caches by smaller parts explains."""


def scaled(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per training case, with ``speedup`` and ``efficiency`` over one rank."""
    calls = of_task(frame[frame["cp"] == 1], "train_step")
    if calls.empty or not (calls["world_size"] > 1).any():
        return calls.iloc[:0]
    rows = per_case(calls, phases=("step",), values=("median_ms", "tokens_per_s"))
    group = point_groups(rows, ("strategy", "world_size"))
    alone = rows[(rows["world_size"] == 1) & (rows["status"] == "ok")]
    rates = alone.groupby(group[alone.index])["step_tokens_per_s"].first()
    rows["speedup"] = rows["step_tokens_per_s"] / group.map(rates)
    rows["efficiency"] = rows["speedup"] / rows["world_size"]
    rows["efficiency_unlike"], rows["efficiency_mark"] = unlike(rows, group, alone)
    return rows


@table("strategy_scaling")
def build(frame: pd.DataFrame) -> Table | None:
    rows = scaled(frame)
    if rows.empty:
        return None
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["model", "precision", "strategy", "world_size"],
        keep=["strategy", "world_size"],
        without=UNUSED,
        metrics=[
            time_column("step", "step (ms)"),
            Column(key="step_tokens_per_s", header="tokens/s", format=fmt.number),
            Column(key="speedup", header="speed-up", format=ratio, mark="efficiency_mark"),
            Column(
                key="efficiency",
                header="efficiency (%)",
                format=fmt.percent,
                mark="efficiency_mark",
            ),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
        ],
    )
    if (rows["efficiency"] > IMPLAUSIBLE).any():
        built.footnotes.append(
            "Efficiency above 100% says that the one rank was disturbed while it was measured, or "
            "measured on another host; measure both again."
        )
    if (rows["strategy"].isin(_casting_shares()) & (rows["efficiency"] > 1)).any():
        built.footnotes.append(
            "FSDP casts its share of the weights once a step, before it gathers them; under "
            "autocast one rank casts all of them, so that more than 100% can be right."
        )
    if (rows["device"] == "cpu").any():
        built.footnotes.append(
            "On a CPU all ranks share the cores that one rank has to itself, so that efficiency "
            "says what the strategy costs there and not what more devices would bring."
        )
    return built


@finding("strategy_scaling")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[(rows["world_size"] > 1) & rows["efficiency"].notna()]
    if known.empty:
        return None
    most = known[known["world_size"] == known["world_size"].max()]
    ranks = int(most["world_size"].iloc[0])
    clear = most[most["efficiency_mark"] == ""]
    claimed = None
    if len(clear):
        which = f" with {clear['strategy'].iloc[0]}" if len(clear) == 1 else ""
        claimed = f"efficiency on {ranks} ranks is {percent_span(clear['efficiency'])}{which}"
    return sentence(
        claimed,
        say_fastest(most, "step_median_ms", ("strategy",)),
        say_unlike(most["efficiency_unlike"], "efficiency", "the single rank"),
    )


def _casting_shares() -> list[str]:
    """Strategies whose ranks cast their own share of the weights alone."""
    return [entry.name for entry in STRATEGIES if entry.target.casts_shares]
