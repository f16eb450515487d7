"""Training steps on several ranks: what they are compared with, and what their traces show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from harness.analysis.case_columns import GIB
from harness.analysis.comparison import AXES, compare
from harness.bench.intervals import length, overlap, union
from harness.cases import format as fmt
from harness.cases.case import Case
from harness.predictions.bucket_overhead import LinkModel, fit_link
from harness.predictions.training import (
    MIB,
    Footprint,
    footprint,
    gradient_bytes,
    gradient_sizes,
    sent_bytes,
    step_sent_bytes,
)
from harness.render.rows import of_task, per_case
from parallel.data.buckets import fill_buckets

PHASES = ("forward", "backward", "communication", "optimizer", "step")

COMPUTE = "compute"

UNUSED = ("attention", "compile_mode")


def on_ranks(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per training case whose ranks have batches of their own.

    Columns beyond those of :func:`harness.render.rows.per_case`: ``bucket_mib`` (None where there
    are no buckets of a size); ``over_peer``, its step's time over that of PyTorch's DDP, with
    ``over_low``, ``over_high``, ``over_verdict`` and ``over_mark``; ``communication_share`` of the
    step, of the phase of that name; and from the trace ``traced_ms``, ``hidden_share``,
    ``exposed_ms`` and ``exposed_share`` of the busiest rank and ``exposed_ranks``, the percentages
    of the least and the most exposed rank.
    """
    calls = of_task(frame[frame["world_size"] > frame["cp"]], "train_step")
    if calls.empty:
        return calls
    rows = per_case(calls, phases=PHASES, values=("median_ms", "tokens_per_s"))
    steps = calls[calls["phase"] == "step"].reset_index(drop=True)
    pairs = compare(steps, replace(AXES["strategy"], needs_baseline=True)).set_index("case_id")
    # A ratio of times here, and of speeds there.
    inverse = {"over_peer": "ratio", "over_low": "ratio_high", "over_high": "ratio_low"}
    for name, key in inverse.items():
        rows[name] = 1 / rows["case_id"].map(pairs[key].astype(float))
    rows["over_verdict"] = rows["case_id"].map(pairs["verdict"])
    apart = pairs["apart_mark"].to_dict()
    rows["over_mark"] = [apart.get(case_id, "") for case_id in rows["case_id"]]
    rows["over_interval"] = [
        None if low != low else f"{low:.3f} to {high:.3f}"
        for low, high in zip(rows["over_low"], rows["over_high"], strict=True)
    ]
    rows["communication_share"] = rows["communication_median_ms"] / rows["step_median_ms"]
    rows["bucket_mib"] = [case["parallel"].get("bucket_size_mb") for case in rows["case"]]
    timelines = rows["timeline"].where(rows["status"] == "ok")
    traced = pd.DataFrame([_observed(passes) for passes in timelines], columns=TRACED)
    rows = pd.concat([rows, traced.set_index(rows.index)], axis=1)
    # Under the profiler, so that it can take longer than a step without it.
    slowed = (rows["traced_ms"] > rows["step_median_ms"]).tolist()
    rows["traced_impossible"] = [["traced"] if is_so else [] for is_so in slowed]
    rows["traced_mark"] = [fmt.CIRCLED_SLASH if is_so else "" for is_so in slowed]
    rows.loc[slowed, ["hidden_share", "exposed_ms", "exposed_share"]] = float("nan")
    rows.loc[slowed, "exposed_ranks"] = None
    return rows


TRACED = ["traced_ms", "hidden_share", "exposed_ms", "exposed_share", "exposed_ranks"]


def _observed(passes: Any) -> tuple[float | str | None, ...]:
    """Communication of the busiest rank.

    It waits for no other rank's computing, so what is not hidden is the transfer itself.
    """
    nothing = (*(float("nan"),) * (len(TRACED) - 1), None)
    if not isinstance(passes, list) or not passes:
        return nothing
    ranks = [lanes(rank["spans"]) for rank in passes[0] if rank["spans"]]
    if not ranks:
        return nothing
    computing, sending = max(ranks, key=lambda pair: length(pair[0]))
    total, hidden = length(sending), overlap(computing, sending)
    share = hidden / total if total else float("nan")
    exposed = [_exposed_share(*rank) for rank in ranks]
    ends = dict.fromkeys(fmt.percent(end) for end in (min(exposed), max(exposed)))
    return total, share, total - hidden, _exposed_share(computing, sending), " to ".join(ends)


def _exposed_share(
    computing: list[tuple[float, float]], sending: list[tuple[float, float]]
) -> float:
    """How much of a rank's step it communicates and computes nothing meanwhile."""
    whole = union([*computing, *sending])
    return (length(sending) - overlap(computing, sending)) / (whole[-1][1] - whole[0][0])


def lanes(spans: list[list[Any]]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """A rank's times of computing and of communicating, as disjoint intervals."""
    computing = union((start, end) for _, kind, _, start, end in spans if kind == COMPUTE)
    sending = union((start, end) for _, kind, _, start, end in spans if kind != COMPUTE)
    return computing, sending


def footprint_of(values: dict[str, Any]) -> Footprint | None:
    """Predicted memory of a recorded case; None if this version cannot read the case."""
    try:
        return footprint(Case.from_dict(values))
    except (ValueError, TypeError, KeyError):
        return None


def traffic_of(values: dict[str, Any], counted: Any) -> dict[str, float]:
    """MiB of one step: by operation as counted, and sent as counted and by formula."""
    found: dict[str, float] = {}
    if isinstance(counted, list) and counted:
        # Every rank takes part in the same operations.
        rank = counted[0]
        for item in rank:
            name = item["collective"]
            found[name] = found.get(name, 0.0) + item["bytes"] / MIB
            found["calls"] = found.get("calls", 0) + item["calls"]
        found["sent"] = (
            sum(sent_bytes({item["collective"]: item["bytes"]}, item["ranks"]) for item in rank)
            / MIB
        )
    try:
        case = Case.from_dict(values)
    except (ValueError, TypeError, KeyError):
        return found
    found["predicted"] = step_sent_bytes(case) / MIB
    return found


def fitted_links(frame: pd.DataFrame) -> dict[tuple[str, int], LinkModel]:
    """o and w by device and ranks, from the all-reduces that were measured among the records."""
    found = {}
    calls = frame[(frame["collective"] == "all_reduce") & (frame["status"] == "ok")]
    calls = calls[calls["median_ms"].notna()]
    for _, group in calls.groupby(["device", "world_size"]):
        sizes = group["size_bytes"].astype(float).tolist()
        link = fit_link(sizes, (group["median_ms"] / 1e3).tolist())
        if link is not None:
            first = group.iloc[0]
            found[str(first["device"]), int(first["world_size"])] = link
    return found


def bucketed(frame: pd.DataFrame) -> pd.DataFrame:
    """Cases with buckets of a size, whose link is known, with what the model of overhead says.

    Columns beyond those of :func:`on_ranks`: ``link``, ``size_bytes`` of all gradients,
    ``buckets``, ``model_ms`` and ``best_mib``; ``transfers_ms`` of all buckets, ``last_mib``, the
    size of the last one, and ``queue_ms``, what a queue of buckets leaves after this backward pass.
    """
    rows = on_ranks(frame)
    links = fitted_links(frame)
    if rows.empty or not links:
        return rows.iloc[:0]
    places = zip(rows["device"], rows["world_size"], strict=True)
    found = [links.get((device, int(ranks))) for device, ranks in places]
    rows["link"] = pd.Series(found, index=rows.index, dtype=object)
    rows = rows[rows["bucket_mib"].notna() & rows["link"].notna()].reset_index(drop=True)
    if rows.empty:
        return rows
    cases = [Case.from_dict(values) for values in rows["case"]]
    rows["size_bytes"] = [gradient_bytes(case) for case in cases]
    sizes = [
        [sum(bucket) for bucket in fill_buckets(gradient_sizes(case)[::-1], mib * MIB)]
        for case, mib in zip(cases, rows["bucket_mib"], strict=True)
    ]
    rows["buckets"] = [len(each) for each in sizes]
    rows["last_mib"] = [each[-1] / MIB for each in sizes]
    known = list(zip(rows["link"], rows["size_bytes"], rows["buckets"], strict=True))
    rows["model_ms"] = [1e3 * link.added_seconds(size, count) for link, size, count in known]
    rows["best_mib"] = [link.best_bucket_bytes(size) / MIB for link, size, _ in known]
    rows["transfers_ms"] = [
        1e3 * sum(map(link.seconds, each)) for link, each in zip(rows["link"], sizes, strict=True)
    ]
    rows["queue_ms"] = [
        1e3 * link.queued_seconds(each, backward_ms / 1e3)
        for link, each, backward_ms in zip(
            rows["link"], sizes, rows["backward_median_ms"], strict=True
        )
    ]
    rows["overhead_us"] = [1e6 * link.overhead_s for link in rows["link"]]
    rows["link_gb_s"] = [link.bytes_per_s / 1e9 for link in rows["link"]]
    return rows


def rank_gib(memory: list[dict[str, Any]], key: str) -> float:
    """Largest over ranks of what each noted, in GiB."""
    values = [rank[key] for rank in memory if key in rank]
    return max(values) / GIB if values else float("nan")
