"""From runs of kernels to what a record keeps: rows by phase and range, and what a step adds up to.

tool      torch or nsys            steps    profiled steps
unit      kernel, or operator      ranks    processes
phases    per phase and for ``step``, means per step and rank: ``wall_ms`` by the host's
          clock, ``kernel_ms`` all kernels together, ``busy_ms`` any kernel running,
          ``launches``
rows      per phase, range, kernel and category, sums over steps and ranks: ``calls``,
          ``total_ms``, ``flops``, ``bytes`` (None where shapes do not tell)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.profilers._categories import SMALL_ONES, category_of
from harness.profilers._ranges import place_of
from harness.profilers._trace import STEP, Run, Trace, Windows, runs_of, windows_of

OUTSIDE = "between"
"""What tables call the phase of a kernel that ran between phases."""

SMALL = 5e-4
"""Share of all time below which a kernel is one of SMALL_ONES."""

MAX_NAME = 200

_KEY = ("phase", "range", "kernel", "category", "recomputed")
_SUMS = ("calls", "total_ms", "flops", "bytes")


def summarise(trace: Trace, tool: str) -> dict[str, Any]:
    """The note of one rank. ValueError if the trace has no step."""
    windows = windows_of(trace)
    if not windows.steps:
        raise ValueError("the trace has no range called step: nothing was profiled")
    return {
        "tool": tool,
        "unit": "kernel" if len(trace.kernels) else "operator",
        "steps": len(windows.steps),
        "ranks": 1,
        **_sums(runs_of(trace, windows), windows),
    }


def _sums(runs: Iterable[Run], windows: Windows) -> dict[str, Any]:
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    busy: dict[str, list[tuple[float, float]]] = {}
    phases: dict[str, dict[str, float]] = {}
    calls: dict[int, list[tuple[dict[str, Any], float]]] = {}
    costs: dict[int, Any] = {}
    for run in runs:
        path = place_of(run.path)
        category = category_of(run.name, run.operator, run.phase, path)
        kernel = run.name[:MAX_NAME]
        key = (run.phase or OUTSIDE, "/".join(path), kernel, category, run.recomputed)
        row = rows.setdefault(key, dict.fromkeys(_SUMS, 0.0) | {"flops": None, "bytes": None})
        row["calls"] += 1
        row["total_ms"] += run.duration_us / 1e3
        if run.cost is not None:
            costs[run.operator_call] = run.cost
            calls.setdefault(run.operator_call, []).append((row, run.duration_us))
        for name in {run.phase or OUTSIDE, STEP}:
            total = phases.setdefault(name, {"kernel_ms": 0.0, "launches": 0})
            total["kernel_ms"] += run.duration_us / 1e3
            total["launches"] += 1
            busy.setdefault(name, []).append((run.start_us, run.start_us + run.duration_us))
    for call, shares in calls.items():
        _share_cost(costs[call], shares)
    steps = len(windows.steps)
    for name, total in phases.items():
        total["busy_ms"] = _covered(busy[name]) / 1e3 / steps
        total["wall_ms"] = _wall(windows, name) / 1e3 / steps
        total["kernel_ms"] /= steps
        total["launches"] /= steps
    named = [dict(zip(_KEY, key, strict=True)) | row for key, row in rows.items()]
    return {"phases": phases, "rows": _small_together(named)}


def _small_together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Longest first; those too short to matter as one for each range and category."""
    least_ms = SMALL * sum(row["total_ms"] for row in rows)
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row["total_ms"] < least_ms:
            row = row | {"kernel": SMALL_ONES}
        _add(kept, row)
    return sorted(kept.values(), key=lambda row: -row["total_ms"])


def _add(rows: dict[tuple[Any, ...], dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row to that of the same kernel in the same place."""
    key = tuple(row[name] for name in _KEY)
    mine = rows.setdefault(key, {name: row[name] for name in _KEY} | dict.fromkeys(_SUMS))
    for name in _SUMS:
        values = [value for value in (mine[name], row[name]) if value is not None]
        mine[name] = sum(values) if values else None


def _share_cost(cost: Any, shares: list[tuple[dict[str, Any], float]]) -> None:
    """Share what an operator must do among the kernels that it launched, by their time."""
    whole = sum(duration for _, duration in shares)
    for row, duration in shares:
        share = duration / whole if whole else 1 / len(shares)
        row["flops"] = (row["flops"] or 0.0) + cost.flops * share
        row["bytes"] = (row["bytes"] or 0.0) + cost.bytes * share


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _wall(windows: Windows, name: str) -> float:
    if name == STEP:
        return sum(end - start for start, end in windows.steps)
    return sum(
        end - start
        for start, end, phase in windows.phases
        if phase == name and windows.step_of(start) is not None
    )


def add_attention_costs(
    rows: list[dict[str, Any]], costs: dict[tuple[str, bool], tuple[float, float]]
) -> None:
    """Give fused attention its FLOPs and bytes, which no operator's shapes tell, by time.

    Args:
        costs: of all calls of a phase, repeated or not.
    """
    for (phase, again), (flops, moved) in costs.items():
        mine = [
            row
            for row in rows
            if (row["phase"], row["recomputed"], row["category"]) == (phase, again, "attention")
        ]
        whole = sum(row["total_ms"] for row in mine)
        for row in mine:
            share = row["total_ms"] / whole if whole else 0.0
            row["flops"], row["bytes"] = flops * share, moved * share


def merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The notes of all ranks as one: rows added up, phases as means, the slowest rank beside."""
    if len(ranks) == 1:
        return ranks[0]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rank in ranks:
        for row in rank["rows"]:
            _add(rows, row)
    names = list(dict.fromkeys(name for rank in ranks for name in rank["phases"]))
    phases = {name: _mean([rank["phases"].get(name) for rank in ranks]) for name in names}
    return {
        **ranks[0],
        "ranks": len(ranks),
        "phases": phases,
        "kernel_ms_by_rank": [rank["phases"][STEP]["kernel_ms"] for rank in ranks],
        "rows": sorted(rows.values(), key=lambda row: -row["total_ms"]),
    }


def _mean(parts: list[dict[str, float] | None]) -> dict[str, float]:
    known = [part for part in parts if part is not None]
    return {key: sum(part[key] for part in known) / len(parts) for key in known[0]}
