"""Reads an export of Nsight Systems into the same columns as a trace of torch.profiler.

``nsys export --type=sqlite`` writes tables of spans in nanoseconds: kernels, copies, calls of
the CUDA runtime that launched them (joined by their correlation), and NVTX ranges. Operators are
ranges too, from torch.autograd.profiler.emit_nvtx, as ``aten::mm, seq = 7``: an operator of the
backward pass has the sequence number of the forward operator whose gradient it computes.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from harness.profilers.kernels.profile_trace import STEP, WARM_UP, ProfileTrace

_PUSH_POP = 59
"""eventType of a range that one thread pushes and pops."""

_OPERATOR = re.compile(r"(?P<name>[^,]*?::[^,]*|\w+Backward\w*|[^,]+)(?:, seq = (?P<seq>-?\d+))?.*")

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_OTHER_KERNELS = {
    "CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "Memset",
}
_LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"


def read_nsight_export(path: Path, phases: tuple[str, ...], ranges: Iterable[str]) -> ProfileTrace:
    """The trace in an export of Nsight Systems.

    Args:
        phases: names of the ranges that are phases of a step.
        ranges: names of parts of a step, without a number behind them. Other NVTX ranges are
            operators.

    Raises ValueError that names the file if it is no such export, or has no kernel in it.
    """
    ours = (STEP, WARM_UP, *phases, *ranges)
    trace = ProfileTrace(phases=phases)
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            _read(database, trace, ours)
    except sqlite3.Error as error:
        raise ValueError(f"{path}: not an export of Nsight Systems ({error})") from error
    if not len(trace.kernels):
        raise ValueError(f"{path}: no kernel was captured")
    return trace


def _read(database: sqlite3.Connection, trace: ProfileTrace, ours: tuple[str, ...]) -> None:
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
    kernels = f"""SELECT k.start, k.end, k.correlationId, s.value FROM {_KERNELS} k
                  JOIN StringIds s ON s.id = k.demangledName"""
    if _KERNELS in tables:
        for start, end, correlation, name in database.execute(kernels):
            number = trace.names.number(name)
            trace.kernels.add(0, start / 1e3, (end - start) / 1e3, number, correlation)
    for table, name in _OTHER_KERNELS.items():
        if table in tables:
            number = trace.names.number(name)
            query = f"SELECT start, end, correlationId FROM {table}"
            for start, end, correlation in database.execute(query):
                trace.kernels.add(0, start / 1e3, (end - start) / 1e3, number, correlation)
    if _LAUNCHES in tables:
        query = f"SELECT start, end, globalTid, correlationId FROM {_LAUNCHES}"
        for start, end, thread, correlation in database.execute(query):
            trace.launches.add(thread, start / 1e3, (end - start) / 1e3, 0, correlation)
    if "NVTX_EVENTS" in tables:
        query = f"""SELECT n.start, n.end, n.globalTid, COALESCE(n.text, s.value)
                    FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
                    WHERE n.eventType = {_PUSH_POP} AND n.end IS NOT NULL"""
        for start, end, thread, text in database.execute(query):
            if text is not None:
                _add_range(trace, thread, start / 1e3, (end - start) / 1e3, text, ours)


def _add_range(
    trace: ProfileTrace,
    thread: int,
    start: float,
    duration: float,
    text: str,
    ours: tuple[str, ...],
) -> None:
    if re.sub(r" \d+$", "", text) in ours:
        trace.ranges.add(thread, start, duration, trace.names.number(text), 0)
        return
    match = _OPERATOR.fullmatch(text)
    name = match["name"] if match else text
    trace.operators.add(thread, start, duration, trace.names.number(name), 0)
    sequence = int(match["seq"]) if match and match["seq"] else -1
    if sequence >= 0:
        is_backward = "Backward" in name or name.startswith("autograd::engine")
        links = trace.link_ends if is_backward else trace.link_starts
        links.add(thread, start, 0.0, 0, sequence)
