"""The kernel profile in a record: totals by phase, and rows by phase, range and kernel.

tool      torch or nsys            steps    profiled steps
unit      kernel, or operator      ranks    processes
phases    by phase and for ``step``, means over steps and ranks: ``kernel_ms`` the sum of all
          kernels, ``busy_ms`` the time in which any kernel ran, ``launches``, and ``wall_ms``
          from start to end: by the host's clock, or on a device from the end of the phase
          before to the end of the last kernel
rows      by phase, range, kernel and category, sums over steps and ranks: ``calls``,
          ``total_ms``, ``flops``, ``bytes`` (None where shapes do not tell)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from harness.profilers.kernels.categories import SMALL_ONES, Cost, category_of
from harness.profilers.kernels.kernel_runs import KernelRun, runs_of
from harness.profilers.kernels.profile_trace import STEP, ProfileTrace, Windows, windows_of
from harness.profilers.module_ranges import place_of

OUTSIDE = "between"
"""Phase of a kernel launched between phases."""

SMALL = 5e-4
"""Kernels below this share of all time are merged into SMALL_ONES."""

MAX_NAME = 200

_KEY = ("phase", "range", "kernel", "category", "recomputed")
_SUMS = ("calls", "total_ms", "flops", "bytes")


def summarise(trace: ProfileTrace, tool: str) -> dict[str, Any]:
    """The note of one rank. ValueError if the trace has no step."""
    windows = windows_of(trace)
    if not windows.steps:
        raise ValueError("the trace has no range called step: nothing was profiled")
    return {
        "tool": tool,
        "unit": "kernel" if len(trace.kernels) else "operator",
        "steps": len(windows.steps),
        "ranks": 1,
        **_sums(runs_of(trace, windows), windows, on_device=len(trace.kernels) > 0),
    }


def _sums(runs: Iterable[KernelRun], windows: Windows, *, on_device: bool) -> dict[str, Any]:
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    busy: dict[str, tuple[array[float], array[float]]] = {}
    phases: dict[str, dict[str, float]] = {}
    shares = _Shares()
    ends_of: dict[tuple[str, int], float] = {}
    for run in runs:
        path = place_of(run.path)
        category = category_of(run.name, run.operator, run.phase, path)
        kernel = run.name[:MAX_NAME]
        key = (run.phase or OUTSIDE, "/".join(path), kernel, category, run.recomputed)
        row = rows.setdefault(key, dict.fromkeys(_SUMS, 0.0) | {"flops": None, "bytes": None})
        row["calls"] += 1
        row["total_ms"] += run.duration_us / 1e3
        if run.cost is not None:
            number = numbers.setdefault(key, len(numbers))
            shares.add(run.operator_call, number, run.duration_us, run.cost)
        for name in {run.phase or OUTSIDE, STEP}:
            total = phases.setdefault(name, {"kernel_ms": 0.0, "launches": 0})
            total["kernel_ms"] += run.duration_us / 1e3
            total["launches"] += 1
            end = run.start_us + run.duration_us
            ends_of[name, run.step] = max(end, ends_of.get((name, run.step), end))
            starts, ends = busy.setdefault(name, (array("d"), array("d")))
            starts.append(run.start_us)
            ends.append(end)
    for key, (flops, moved) in zip(numbers, shares.by_row(len(numbers)), strict=True):
        rows[key]["flops"], rows[key]["bytes"] = flops, moved
    steps = len(windows.steps)
    walls = _walls(windows, ends_of if on_device else {})
    for name, total in phases.items():
        total["busy_ms"] = _covered(*busy[name]) / 1e3 / steps
        total["wall_ms"] = walls.get(name, 0.0) / 1e3 / steps
        total["kernel_ms"] /= steps
        total["launches"] /= steps
    named = [dict(zip(_KEY, key, strict=True)) | row for key, row in rows.items()]
    return {"phases": phases, "rows": _small_together(named)}


class _Shares:
    """Divides the cost of each operator among the kernels that it launched, by their time."""

    def __init__(self) -> None:
        self._calls, self._rows = array("q"), array("q")
        self._times, self._flops, self._bytes = array("d"), array("d"), array("d")

    def add(self, call: int, row: int, duration_us: float, cost: Cost) -> None:
        """Add a kernel of an operator's call, whose whole cost is ``cost``."""
        self._calls.append(call)
        self._rows.append(row)
        # A kernel of no measurable time still has a share.
        self._times.append(max(duration_us, 1e-6))
        self._flops.append(cost.flops)
        self._bytes.append(cost.bytes)

    def by_row(self, num_rows: int) -> list[tuple[float, float]]:
        """FLOPs and bytes of each row."""
        times, rows = np.asarray(self._times), np.asarray(self._rows)
        _, call = np.unique(np.asarray(self._calls), return_inverse=True)
        share = times / np.bincount(call, weights=times)[call] if len(times) else times
        sums = [
            np.bincount(rows, weights=share * np.asarray(costs), minlength=num_rows)
            for costs in (self._flops, self._bytes)
        ]
        return [(float(flops), float(moved)) for flops, moved in zip(*sums, strict=True)]


def _small_together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows, longest first; the short ones merged into one for each range and category."""
    least_ms = SMALL * sum(row["total_ms"] for row in rows)
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row["total_ms"] < least_ms:
            row = row | {"kernel": SMALL_ONES}
        _add(kept, row)
    return sorted(kept.values(), key=lambda row: -row["total_ms"])


def _add(rows: dict[tuple[Any, ...], dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row to the row of the same kernel in the same place."""
    key = tuple(row[name] for name in _KEY)
    mine = rows.setdefault(key, {name: row[name] for name in _KEY} | dict.fromkeys(_SUMS))
    for name in _SUMS:
        values = [value for value in (mine[name], row[name]) if value is not None]
        mine[name] = sum(values) if values else None


def _covered(starts: array[float], ends: array[float]) -> float:
    """Length of the union of spans."""
    start, end = np.asarray(starts), np.asarray(ends)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    # When everything before each span has ended.
    before = np.concatenate([[start[0]], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(0.0, end - np.maximum(start, before)).sum())


def _walls(windows: Windows, ends_of: dict[tuple[str, int], float]) -> dict[str, float]:
    """Microseconds of each phase, and of ``step``, summed over all steps.

    Args:
        ends_of: end of the last kernel by phase and step; empty where the host's clock counts.
    """
    total = {STEP: sum(end - start for start, end in windows.steps)}
    clocks = [start for start, _ in windows.steps]
    for start, end, phase in windows.phases:
        step = windows.step_of(start)
        if step is not None:
            begin = max(start, clocks[step]) if ends_of else start
            clocks[step] = max(begin, ends_of.get((phase, step), end))
            total[phase] = total.get(phase, 0.0) + clocks[step] - begin
    return total


def add_attention_costs(
    rows: list[dict[str, Any]], costs: dict[tuple[str, bool], tuple[float, float]]
) -> None:
    """Divide FLOPs and bytes of fused attention, which no shapes tell, among its rows by time.

    Args:
        costs: FLOPs and bytes of all calls, by phase and whether it is a recomputation.
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
    """The notes of all ranks as one: sums of rows, means of phases, kernel time by rank."""
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
