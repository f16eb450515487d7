"""Attention over several ranks: every scheme, transport and kernel beside one device."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from harness.cases import format as fmt
from harness.render.findings import best_row, percent_span, say_fastest, sentence
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.context.split_rows import predicted_gib, split_calls

CAPTION = (
    "Attention on sequences split over several ranks: median times of the slowest rank; speed-up "
    "over the same kernel on one device with the whole sequence, and efficiency, which is that "
    "divided by the ranks; exposed: what the busiest rank waits for communication in a traced "
    "pass; sent: bytes that leave a rank in a pass; peak memory of the fullest rank as predicted "
    "and measured; the largest relative error against float64."
)


@table("context_parallel")
def build(frame: pd.DataFrame) -> Table | None:
    rows = split_calls(frame)
    if rows.empty:
        return None
    rows["predicted"] = predicted_gib(rows)
    rows.loc[rows["status"] != "ok", "check_error"] = float("nan")
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["world_size", "seq_len", "kernel", "scheme", "transport"],
        keep=["scheme", "transport"],
        without=["attention", "strategy"],
        metrics=[
            time_column("forward", "forward (ms)", detail=True),
            time_column("backward", "backward (ms)", detail=True),
            Column(
                key="whole_ms",
                header="both (ms)",
                format=fmt.number,
                status="status",
                mark="whole_mark",
                iqr="whole_iqr_ms",
            ),
            Column(key="one_device_ms", header="one device (ms)", format=fmt.number, detail=True),
            Column(key="speedup", header="speed-up", format=fmt.factor),
            Column(key="efficiency", header="efficiency (%)", format=fmt.percent),
            Column(key="exposed_ms", header="exposed (ms)", format=fmt.number),
            Column(key="sent_mib", header="sent (MiB)", format=fmt.number),
            Column(key="predicted", header="predicted (GiB)", format=fmt.number, detail=True),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
            Column(key="check_error", header="error", format=fmt.scientific, detail=True),
        ],
    )
    if (rows["padding_tokens"] > 0).any():
        most = int(rows["padding_tokens"].max())
        built.footnotes.append(
            f"Lengths that do not divide are padded, by {most} tokens at most; padding is computed "
            "but counts for nothing."
        )
    if (rows["device"] == "cpu").any():
        built.footnotes.append(
            "On a CPU all ranks share the cores that one device has to itself, so that their "
            "efficiency says what splitting costs there and not what more devices would bring."
        )
    built.footnotes += crossovers(rows)
    return built


@finding("context_parallel")
def say(rows: pd.DataFrame) -> str | None:
    good = rows[rows["whole_ms"].notna()]
    if good.empty:
        return None
    most = good[good["world_size"] == good["world_size"].max()]
    longest = most[most["seq_len"] == most["seq_len"].max()]
    best = best_row(longest, "whole_ms", highest=False)
    where = f"{int(best['world_size'])} ranks and {fmt.integer(best['seq_len'])} tokens"
    gained = None
    if best["speedup"] == best["speedup"]:
        gained = (
            f"{fmt.factor(best['speedup'])} of one device, "
            f"{percent_span([best['efficiency']])} efficient"
        )
    waited = None
    if best["exposed_ms"] == best["exposed_ms"]:
        share = best["exposed_ms"] / best["whole_ms"]
        waited = f"its busiest rank waits for communication in {percent_span([share])} of the time"
    name = f"{best['scheme']} over {best['transport']}"
    return sentence(
        f"with {where} {name} is fastest{f' ({gained})' if gained else ''}",
        waited,
        say_fastest(rows, "whole_ms", ("scheme", "transport", "attention", "modes", "strategy"))
        if len(good) > len(longest)
        else None,
    )


def crossovers(rows: pd.DataFrame) -> Iterator[str]:
    """Sentences on the length from which the best ring is faster than the best gather."""
    rows = rows[(rows["status"] == "ok") & rows["gathers"].notna()]
    for (ranks, kernel), group in rows.groupby(["world_size", "kernel"]):
        best = group.pivot_table(
            index="seq_len", columns="gathers", values="whole_ms", aggfunc="min"
        ).dropna()
        if len(best.columns) < 2 or len(best) < 2:
            continue
        ahead = best[False] <= best[True]
        # From the length on from which it stays ahead.
        lasting = ahead[::-1].cummin()[::-1]
        where = f"{ranks} ranks, {kernel}"
        if not lasting.any():
            yield f"{where}: the best gather is faster than the best ring at every length."
        elif lasting.all():
            yield f"{where}: the best ring is faster than the best gather at every length."
        else:
            first = fmt.integer(min(lasting.index[lasting]))
            yield f"{where}: the best ring is faster than the best gather from {first} tokens on."
