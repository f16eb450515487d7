"""How evenly ranks share a packed batch, counted from what runs, and the keys that travel."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.context.split_rows import MIB, split_calls
from harness.sentences.findings import by_name, percent_span, sentence, span
from parallel import BACKENDS
from parallel.context.attention import ContextParallelAttention, SequenceParallelAttention
from parallel.context.documents.counts import DocumentCounts, count_documents
from parallel.context.documents.layout import Documents

CAPTION = (
    "Packed batches under a causal mask, in a forward pass. Tokens: on each rank, padding "
    "included. Work: the pairs that the mask keeps, the busiest rank over the mean, and computing "
    "in traced passes likewise, forward and backward. Keys: of other ranks that come to all ranks "
    "together, with their values, and as a part of what comes where each rank gets all keys. "
    "Bound: the fewest that must come in any placement whose fullest and whose busiest rank have "
    "no more than here with documents placed; it takes documents one by one, so that a batch of "
    "several may not reach it. Sent: by the rank that sends most, in both passes."
)


@table("document_balance")
def build(frame: pd.DataFrame) -> Table | None:
    rows = split_calls(frame)
    if rows.empty:
        return None
    rows = rows[rows["packed_lengths"].notna() & rows["causal"].astype(bool)]
    found = [
        _counts(scheme, int(ranks), lengths)
        for scheme, ranks, lengths in zip(
            rows["scheme"], rows["world_size"], rows["packed_lengths"], strict=True
        )
    ]
    rows = rows.assign(counts=pd.Series(found, index=rows.index, dtype=object))
    rows = rows[rows["counts"].notna()].reset_index(drop=True)
    if rows.empty:
        return None
    counts: list[DocumentCounts] = rows["counts"].tolist()
    mib = rows["key_bytes"] / MIB
    received = pd.Series([sum(its.received) for its in counts], dtype=float)
    gathered = pd.Series([its.num_tokens * (len(its.pairs) - 1) for its in counts], dtype=float)
    least = pd.Series([its.least_received for its in counts], dtype=float)
    rows["tokens"] = [its.local_len for its in counts]
    rows["padding"] = [its.padding for its in counts]
    rows["pair_imbalance"] = [its.imbalance for its in counts]
    rows["per_rank"] = [
        " / ".join(fmt.number(pairs / 1e6) for pairs in its.pairs) for its in counts
    ]
    rows["imbalance"] = rows["compute_ms"].map(_imbalance)
    rows["keys_mib"] = received * mib
    rows["keys_most_mib"] = pd.Series([max(its.received) for its in counts], dtype=float) * mib
    rows["keys_share"] = received / gathered
    rows["bound_mib"] = least * mib
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["world_size", "batch_size", "seq_len", "kernel", "scheme", "transport"],
        keep=["scheme"],
        without=["attention", "strategy"],
        metrics=[
            Column(key="tokens", header="tokens", format=fmt.integer),
            Column(key="padding", header="padding", format=fmt.integer),
            Column(key="per_rank", header="by rank (Mpairs)", group="work", detail=True),
            Column(key="pair_imbalance", header="pairs", format=fmt.factor, group="work"),
            Column(key="imbalance", header="measured", format=fmt.factor, group="work"),
            Column(key="keys_mib", header="come (MiB)", format=fmt.number, group="keys"),
            Column(
                key="keys_most_mib",
                header="to one rank (MiB)",
                format=fmt.number,
                group="keys",
                detail=True,
            ),
            Column(key="keys_share", header="of all (%)", format=fmt.percent, group="keys"),
            Column(key="bound_mib", header="bound (MiB)", format=fmt.number, group="keys"),
            Column(key="sent_mib", header="sent (MiB)", format=fmt.number),
            Column(
                key="whole_ms",
                header="both (ms)",
                format=fmt.number,
                status="whole_status",
                mark="whole_mark",
                iqr="whole_iqr_ms",
            ),
            Column(
                key="efficiency", header="efficiency (%)", format=fmt.percent, mark="unlike_mark"
            ),
        ],
    )


@finding("document_balance")
def say(rows: pd.DataFrame) -> str | None:
    work = _by_most(rows, "pair_imbalance", span)
    keys = _by_most(rows, "keys_share", percent_span)
    return sentence(
        f"the busiest rank computes {by_name(work, 'the mean')}, by pairs",
        f"keys that come are {by_name(keys, 'of those that a gather brings')}",
    )


def _by_most(
    rows: pd.DataFrame, value: str, say: Callable[[pd.Series], str]
) -> list[tuple[str, str]]:
    """The values of each scheme in words, and its name; alike ones behind each other."""
    said = [(say(part[value]), str(name)) for name, part in rows.groupby("scheme", sort=False)]
    most = {words: rows.loc[rows["scheme"] == name, value].max() for words, name in said}
    return sorted(said, key=lambda pair: most[pair[0]])


def _imbalance(compute_ms: object) -> float:
    """The busiest rank's computing over the mean; nothing where nothing was traced."""
    if not isinstance(compute_ms, list) or not sum(compute_ms):
        return float("nan")
    return float(max(compute_ms) * len(compute_ms) / sum(compute_ms))


def _counts(scheme: str, num_ranks: int, lengths: list[int]) -> DocumentCounts | None:
    """Counts of a scheme in which keys come to queries; None of others."""
    entry = BACKENDS[scheme]
    attention = entry.target(name=scheme, **entry.preset)
    assert isinstance(attention, SequenceParallelAttention), "it ran on several ranks"
    layout = attention.layout(num_ranks)
    if not isinstance(attention, ContextParallelAttention) and not isinstance(layout, Documents):
        return None
    return count_documents(layout, lengths)
