"""Attention over several ranks: every scheme, transport and kernel beside one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import POINTS
from harness.render.predicted_memory import predicted_columns
from harness.render.rows import speedup_over, verdict_over
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.reports.context.split_rows import launching, split_calls
from harness.sentences.findings import listed, percent_span, say_unlike, sentence, span, told
from harness.sentences.leaders import say_fastest
from harness.sentences.ranking import Standing, standings

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
            Column(key="speedup", header="speed-up", format=fmt.factor, mark="unlike_mark"),
            Column(
                key="efficiency", header="efficiency (%)", format=fmt.percent, mark="unlike_mark"
            ),
            Column(key="exposed_ms", header="exposed (ms)", format=fmt.number),
            Column(key="sent_mib", header="sent (MiB)", format=fmt.number),
            *predicted_columns(rows, header="predicted (GiB)", detail=True),
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
    if good["cuda_graph"].nunique() < 2:
        return _say_splits(good)
    kinds = good.groupby("cuda_graph", sort=True)
    said = [_say_splits(part, launching(bool(graphed))) for graphed, part in kinds]
    return " ".join(filter(None, (_say_graphs(good), *said)))


def _say_graphs(rows: pd.DataFrame) -> str | None:
    """What replays gain over the same passes launched one by one, where verdicts tell."""
    launched = ~rows["cuda_graph"].astype(bool)
    rows = rows.assign(
        gain=speedup_over(rows, "whole_ms", ["cuda_graph"], launched),
        gain_verdict=verdict_over(rows, "whole_evidence", ["cuda_graph"], launched),
    )
    pairs = rows[~launched & rows["gain"].notna()]
    known = told(pairs, "gain", "gain_verdict")
    if known.empty:
        return None
    some = "" if len(known) == len(pairs) else f"{len(known)} of {len(pairs)} "
    take = percent_span(1 / known["gain"])
    return sentence(f"as CUDA graphs, {some}passes take {take} of their time launched one by one")


def _say_splits(good: pd.DataFrame, how: str | None = None) -> str | None:
    """Who is first, and what splitting gains, of passes that were all started alike.

    Args:
        good: rows with a time.
        how: they were started, if others were started otherwise.
    """
    first: str | None
    if good.empty:
        return None
    most = good[good["world_size"] == good["world_size"].max()]
    tokens = _num_tokens(most)
    longest = most[tokens == tokens.max()]
    ranks, length = int(longest["world_size"].iloc[0]), _say_length(longest.iloc[0])
    compared = longest[longest["speedup"].notna()]
    waits = (longest["exposed_ms"] / longest["whole_ms"]).dropna()
    first, overall = _say_first(longest), None
    if len(good) > len(longest):
        overall = _say_first(good)
    if overall and overall.startswith(_NONE_FIRST) and first.startswith(_NONE_FIRST):
        # Said once, of all points.
        first = None
    parts = [
        first,
        _say_gains(compared),
        say_unlike(compared["unlike"], "efficiency", "the one device"),
        f"busiest ranks wait for communication in {percent_span(waits)} of the time, by traces"
        if len(waits)
        else None,
    ]
    there = "; ".join(filter(None, parts))
    where = ", ".join(filter(None, (how, f"with {ranks} ranks and {length}")))
    return sentence(f"{where} {there}" if there else None, overall)


def _num_tokens(rows: pd.DataFrame) -> pd.Series:
    """What is split: all documents of a packed batch, else one of the sequences."""
    packed = rows["packed_lengths"].map(lambda lengths: sum(lengths) if lengths else None)
    return packed.astype(float).fillna(rows["seq_len"])


def _say_length(row: pd.Series) -> str:
    """``16,384 tokens``, and of a packed batch ``60,620 tokens in 8 documents,``."""
    if not isinstance(row["packed_lengths"], list):
        return fmt.counted(row["seq_len"], "token")
    documents = fmt.counted(len(row["packed_lengths"]), "document")
    return f"{fmt.counted(sum(row['packed_lengths']), 'token')} in {documents},"


def _say_gains(compared: pd.DataFrame) -> str | None:
    """Speed-ups over one device, of rows that have one, where verdicts tell."""
    gained = told(compared[compared["unlike_mark"] == ""], "speedup", "speedup_verdict")
    if gained.empty:
        return None
    # Those that are left out may be the fastest ones, so that a part is named as such.
    some = f" with {listed(sorted(gained['scheme'].unique()))}"
    return (
        f"speed-ups over one device are {span(gained['speedup'])}"
        f"{some if len(gained) < len(compared) else ''}, "
        f"{percent_span(gained['efficiency'])} of perfect ones"
    )


_NONE_FIRST = "which"
"""How a part begins that cannot tell who is first."""


VARIED = ("scheme", "transport", "attention", "modes", "strategy")


def _say_first(rows: pd.DataFrame) -> str:
    """Which scheme, over which transport, is fastest among those of the same kernel."""
    said = say_fastest(rows, "whole_ms", VARIED, name=_name)
    return said or f"{len(rows)} splits were measured with nothing beside them"


def _name(row: pd.Series) -> str:
    """``ring over send_recv``."""
    modes = f" ({row['modes']})" if row["modes"] == row["modes"] and row["modes"] else ""
    return f"{row['scheme']} over {row['transport']}{modes}"


def crossovers(rows: pd.DataFrame) -> Iterator[str]:
    """Sentences on where the best ring is faster than the best gather, by verdicts.

    Not of packed batches, which are no longer or shorter by their ``seq_len``.
    """
    rows = rows[(rows["status"] == "ok") & rows["gathers"].notna() & rows["whole_ms"].notna()]
    rows = rows[rows["packed_lengths"].isna()]
    settings = ["world_size", "kernel", "precision", "cuda_graph"]
    for (ranks, kernel, precision, graphed), group in rows.groupby(settings):
        best = group.sort_values("whole_ms", kind="stable")
        best = best.drop_duplicates([*_setting(group), "gathers"])
        found = standings(best, "whole_ms", (*VARIED, "gathers"), name=_kind)
        if len(found) < 2:
            continue
        how = [launching(bool(graphed))] if rows["cuda_graph"].nunique() > 1 else []
        where = ", ".join([f"{ranks} ranks", str(kernel), str(precision), *how])
        yield f"{where}: {_say_kinds(found)}."


def _setting(rows: pd.DataFrame) -> list[str]:
    """The points that a ring and a gather have in common."""
    return [name for name in POINTS if name in rows and name not in VARIED]


RING, GATHER = "a ring", "a gather"


def _kind(row: pd.Series) -> str:
    return GATHER if row["gathers"] else RING


def _say_kinds(found: Sequence[Standing]) -> str:
    """``the best ring is faster than the best gather at 4,096 tokens, slower at 8,192``."""
    places: dict[str, list[str]] = {"faster": [], "slower": [], "level": [], "not told apart": []}
    for standing in sorted(found, key=lambda standing: standing.best["seq_len"]):
        key = {RING: "faster", GATHER: "slower", None: "level"}[standing.first]
        key = "not told apart" if standing.is_open else key
        places[key].append(fmt.integer(standing.best["seq_len"]))
    joined = {
        "faster": "the best ring is faster than the best gather",
        "slower": "the best gather is faster than the best ring",
        "level": "the best ring and the best gather are level",
        "not told apart": "the best ring and the best gather cannot be told apart",
    }
    parts = []
    for key, lengths in places.items():
        if len(lengths) == len(found):
            each = "any" if key == "not told apart" else "every"
            return f"{joined[key]} at {each} length measured"
        if lengths:
            parts.append(f"{joined[key]} at {listed(dict.fromkeys(lengths))} tokens")
    return ", ".join(parts)
