"""Whether balance becomes speed: kernel times per rank beside FLOPs per rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pandas as pd

from harness.analysis.evidence import words_between
from harness.cases import format as fmt
from harness.cases.columns import point_groups
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.context.points import HEADS, IN_GROUPS
from harness.reports.context.split_rows import split_calls
from harness.sentences.findings import by_name, sentence, span, told
from parallel import BACKENDS
from parallel.context.attention import SequenceParallelAttention
from parallel.context.blocks.balance import Balance, count_flops
from parallel.context.blocks.layouts import Contiguous, Layout
from parallel.context.documents.counts import count_documents
from parallel.context.documents.layout import Documents
from parallel.context.heads.nested import SplitsGroups
from parallel.context.heads.split import SplitsHeads

CAPTION = (
    "Computing per rank, forward and backward, from kernel times in traced passes, beside FLOPs "
    "by the pairs that the mask keeps. Imbalance: the busiest rank over the mean. Lockstep: the "
    "sum over steps of the busiest rank's, over the mean. Speed-up: over the same transport and "
    "kernel with contiguous parts, as FLOPs predict it if all time were computing, and measured."
)


@table("balance_measured")
def build(frame: pd.DataFrame) -> Table | None:
    rows = split_calls(frame)
    rows = rows[rows["compute_ms"].notna()] if len(rows) else rows
    if rows.empty or not rows["causal"].any():
        return None
    rows = rows[rows["causal"].astype(bool)].reset_index(drop=True)
    names = ["scheme", "world_size", "seq_len", "gathers", "num_heads", "num_kv_heads"]
    names += ["packed_lengths", "scheme_options"]
    counted = [_predicted(*point) for point in rows[names].itertuples(index=False)]
    rows["split"] = [split for split, _, _ in counted]
    rows["predicted_imbalance"] = [imbalance for _, imbalance, _ in counted]
    rows["predicted_lockstep"] = [lockstep for _, _, lockstep in counted]
    rows["imbalance"] = [max(x) / (sum(x) / len(x)) for x in rows["compute_ms"]]
    rows["least_ms"] = [min(x) for x in rows["compute_ms"]]
    rows["most_ms"] = [max(x) for x in rows["compute_ms"]]
    rows["per_rank"] = [" / ".join(map(fmt.number, x)) for x in rows["compute_ms"]]
    group = point_groups(rows, ["attention", "scheme", "split", "modes"])
    contiguous = rows["split"] == Contiguous.name
    for name, value in (("predicted_speedup", "predicted_lockstep"), ("speedup", "whole_ms")):
        # A ring beside a ring, a gather beside a gather; transports do not tell them apart.
        key = [group, rows["gathers"]]
        base = rows[value].where(contiguous).groupby(key).transform("max")
        rows[name] = (base / rows[value]).where(~contiguous)
    rows["speedup_verdict"] = _verdicts(rows, contiguous, [group, rows["gathers"]])
    return make_table(
        caption=CAPTION,
        rows=rows,
        lead=["world_size", "seq_len", "kernel", "transport", "scheme"],
        keep=["scheme"],
        without=["attention", "strategy"],
        metrics=[
            Column(key="least_ms", header="least (ms)", format=fmt.number, group="computing"),
            Column(key="most_ms", header="most (ms)", format=fmt.number, group="computing"),
            Column(key="per_rank", header="by rank (ms)", group="computing", detail=True),
            Column(key="predicted_imbalance", header="FLOPs", format=fmt.factor, group="imbalance"),
            Column(key="imbalance", header="measured", format=fmt.factor, group="imbalance"),
            Column(key="predicted_lockstep", header="FLOPs", format=fmt.factor, group="lockstep"),
            Column(key="lockstep", header="measured", format=fmt.factor, group="lockstep"),
            Column(
                key="whole_ms",
                header="both (ms)",
                format=fmt.number,
                mark="whole_mark",
                iqr="whole_iqr_ms",
            ),
            Column(key="predicted_speedup", header="FLOPs", format=fmt.factor, group="speed-up"),
            Column(key="speedup", header="measured", format=fmt.factor, group="speed-up"),
        ],
    )


@finding("balance_measured")
def say(rows: pd.DataFrame) -> str | None:
    uneven = rows["imbalance"].groupby(rows["scheme"]).median().sort_values()
    busiest = [(fmt.factor(value), str(name)) for name, value in uneven.items()]
    known = told(rows, "speedup", "speedup_verdict")
    gained = None
    if len(known):
        gained = (
            f"balance brings {span(known['speedup'])} over contiguous parts, where FLOPs alone "
            f"predict {span(known['predicted_speedup'])}"
        )
        if len(known) < (number := int(rows["speedup"].count())):
            gained += f" (told for {len(known)} of {number})"
    return sentence(f"the busiest rank computes {by_name(busiest, 'the mean')} (median)", gained)


def _verdicts(
    rows: pd.DataFrame, contiguous: pd.Series, keys: Sequence[pd.Series]
) -> list[str | None]:
    """The verdict on each row against the slowest of contiguous parts with equal keys."""
    places = list(zip(*keys, strict=True))
    slowest = rows.assign(place=pd.Series(places, index=rows.index, dtype=object))[
        contiguous
    ].sort_values("whole_ms", ascending=False)
    proof = dict(zip(slowest["place"][::-1], slowest["whole_evidence"][::-1], strict=True))
    baselines = [proof.get(place) for place in places]
    return words_between(baselines, rows["whole_evidence"].tolist())


def _predicted(
    scheme: str,
    ranks: int,
    length: int,
    gathers: bool | None,
    num_heads: int,
    num_kv_heads: int,
    packed_lengths: list[int] | None,
    options: dict[str, Any],
) -> tuple[str, float, float]:
    """What is split how, and imbalance and lockstep cost by pairs.

    A gather has one step for all keys, and so have a rank with whole sequences of its heads and
    one with whole documents. Of ranks that form groups, each computes its share of heads in the
    blocks of its group.
    """
    attention = BACKENDS[scheme].target(**options)
    assert isinstance(attention, SequenceParallelAttention), "it ran on several ranks"
    by_heads = 1.0
    if isinstance(attention, SplitsHeads):
        by_heads = attention.head_split(int(ranks), int(num_heads), int(num_kv_heads)).imbalance
    if isinstance(attention, SplitsGroups):
        layout = attention.group_layout(int(ranks))
        if layout.num_ranks > 1:
            balance = _counted(layout, int(length))
            name = layout.name if layout.num_ranks == ranks else IN_GROUPS.format(layout.name)
            return name, _imbalance(balance) * by_heads, balance.lockstep_cost("pair") * by_heads
    if isinstance(attention, SplitsHeads):
        return HEADS, by_heads, by_heads
    layout = attention.layout(int(ranks))
    if isinstance(layout, Documents):
        assert packed_lengths is not None, "documents are those of a packed batch"
        imbalance = count_documents(layout, packed_lengths).imbalance
        return layout.name, imbalance, imbalance
    balance = _counted(layout, int(length))
    imbalance = _imbalance(balance)
    return layout.name, imbalance, imbalance if gathers else balance.lockstep_cost("pair")


def _imbalance(balance: Balance) -> float:
    """FLOPs of the busiest rank over the mean."""
    flops = balance.per_rank("pair")
    return max(flops) / (sum(flops) / len(flops))


@cache
def _counted(layout: Layout, length: int) -> Balance:
    """FLOPs by pairs; tiles are as long as the sequence, since nobody looks at them."""
    return count_flops(layout, length, num_heads=1, head_dim=1, block_q=length, block_k=length)
