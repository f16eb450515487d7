"""Attention over several ranks beside the same kernel on one device, from timelines and times.

What a rank does is taken from the traced passes, whose spans cover kernels and waits; what it
costs, from the measured ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

import pandas as pd

from harness.analysis.evidence import words_between
from harness.cases.columns import point_groups
from harness.render.rows import of_task, per_case, unlike
from harness.reports.context.points import declare_points
from parallel import BACKENDS

declare_points()

PHASES = ("forward", "backward", "forward_backward")

COMPUTE, WAIT = "compute", "wait"

MIB = 2**20


def split_calls(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per attention case on several ranks, with what it is compared with.

    Columns beyond those of :func:`harness.render.rows.per_case`: ``scheme``, ``kernel``,
    ``transport``; ``whole_ms``, the time of both passes (or of forward alone); ``one_device_ms``
    of the same kernel on the whole sequence; ``speedup`` and ``efficiency`` over it, and how that
    was measured ``unlike`` (with ``unlike_mark``); ``compute_ms`` (a list by rank),
    ``exposed_ms``, ``lockstep`` and ``sent_mib``; ``gathers``,
    whether all keys are held at once, None for a peer that does not say.
    """
    calls = of_task(frame, "attention", "document_batch")
    if calls.empty or not (calls["cp"] > 1).any():
        return calls.iloc[:0]
    rows = per_case(calls, phases=PHASES, values=("median_ms", "low_ms", "high_ms"))
    rows = rows.assign(
        kernel=rows["scheme_kernel"],
        transport=rows["scheme_transport"],
        modes=rows["scheme_modes"],
    )
    rows["whole_ms"] = rows["forward_backward_median_ms"].fillna(rows["forward_median_ms"])
    for value in ("low", "high", "iqr"):
        rows[f"whole_{value}_ms"] = rows[f"forward_backward_{value}_ms"].fillna(
            rows[f"forward_{value}_ms"]
        )
    has_both = rows["forward_backward_median_ms"].notna()
    for value in ("mark", "disturbed", "impossible", "evidence"):
        rows[f"whole_{value}"] = rows[f"forward_backward_{value}"].where(
            has_both, rows[f"forward_{value}"]
        )
    rows["whole_status"] = rows["status"]
    varied = ("attention", "scheme", "transport", "modes", "strategy", "world_size")
    group = point_groups(rows, varied)
    alone = rows[rows["cp"] == 1].sort_values("scheme", na_position="first", kind="stable")
    times = alone.groupby(group[alone.index])["whole_ms"].first()
    rows["one_device_ms"] = group.map(times)
    proof = alone.groupby(group[alone.index])["whole_evidence"].first()
    rows["speedup_verdict"] = words_between(
        group.map(proof).tolist(), rows["whole_evidence"].tolist()
    )
    rows["unlike"], rows["unlike_mark"] = unlike(rows, group, alone[alone["whole_ms"].notna()])
    rows = rows[rows["cp"] > 1].reset_index(drop=True)
    rows["gathers"] = [getattr(BACKENDS[name].target, "gathers", None) for name in rows["scheme"]]
    rows["speedup"] = rows["one_device_ms"] / rows["whole_ms"]
    rows["efficiency"] = rows["speedup"] / rows["world_size"]
    timelines = rows["timeline"].where(rows["status"] == "ok")
    observed = pd.DataFrame(
        [_observed(passes) for passes in timelines], columns=OBSERVED, index=rows.index
    )
    return pd.concat([rows, observed], axis=1)


def launching(graphed: bool) -> str:
    """How passes were started, where rows of both kinds stand side by side."""
    return "as CUDA graphs" if graphed else "launched one by one"


OBSERVED = ["compute_ms", "exposed_ms", "lockstep", "sent_mib"]


def _observed(passes: Any) -> tuple[Any, ...]:
    """Medians over the traced passes of one case; nothing where nothing was traced."""
    if not isinstance(passes, list) or not passes or not passes[0][0]["spans"]:
        return None, float("nan"), float("nan"), float("nan")
    by_pass = [[_sums(rank["spans"]) for rank in ranks] for ranks in passes]
    num_ranks = len(by_pass[0])
    compute = [median(ranks[r][COMPUTE] for ranks in by_pass) for r in range(num_ranks)]
    busiest = compute.index(max(compute))
    # The busiest rank waits for no other rank's computing: what it waits for is communication.
    exposed = median(ranks[busiest][WAIT] for ranks in by_pass)
    sent = max(sum(rank["sent_bytes"].values()) for rank in passes[0]) / MIB
    return compute, exposed, median(map(_lockstep, passes)), sent


def _sums(spans: Iterable[list[Any]]) -> dict[str, float]:
    sums = {COMPUTE: 0.0, WAIT: 0.0}
    for _, kind, _, start, end in spans:
        sums[kind] += end - start
    return sums


def _lockstep(ranks: list[dict[str, Any]]) -> float:
    """Sum over steps of the longest computing, over the mean rank's computing of all steps."""
    longest: dict[tuple[str, int], float] = {}
    total = 0.0
    for rank in ranks:
        mine: dict[tuple[str, int], float] = {}
        for phase, kind, step, start, end in rank["spans"]:
            if kind == COMPUTE:
                mine[phase, step] = mine.get((phase, step), 0.0) + end - start
                total += end - start
        for key, value in mine.items():
            longest[key] = max(longest.get(key, 0.0), value)
    return sum(longest.values()) / (total / len(ranks))
