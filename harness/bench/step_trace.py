"""A timeline of each rank's computation and communication in a step, from torch.profiler.

Three consecutive steps are profiled after the measured ones, and the middle one is kept, from
the start of its computation to the start of the next one's. So the timeline shows work that the
step before left to overlap with it (an all-gather of ZeRO behind the next forward pass), and work
that the step leaves itself.

On CUDA, NCCL's kernels are communication, including the time they wait for late ranks, and all
other kernels are computation. PyTorch's operators are not recorded there: thousands of events a
step would delay a host that launches kernels just in time, and expose communication that is
hidden otherwise. On a CPU, computation is the operators of the training thread, and communication
the work of gloo's threads.

The record's ``timeline`` has the format of split attention's: for each pass and rank ``spans`` of
[phase, compute or communication, number, start_ms, end_ms], measured from when the first rank
began the first of the three steps.
"""

from __future__ import annotations

import contextlib
import json
import platform
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from harness.bench.bench import Bench
from harness.bench.intervals import clipped, union

STEPS = 3

STEP = "step"

COMPUTE, COMMUNICATION = "compute", "communication"

CLOSED_GAP_MS = 0.02
"""Gaps in computation up to this length count as computation: launches, Python."""

Event = dict[str, Any]

Mark = tuple[str, float, float]
"""An activity of the host, with its start and end in milliseconds of the trace's clock."""


class _Phases:
    """Replaces a timer, and notes when the host begins and ends each phase."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, int, int]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # The clock of traces too: nanoseconds since 1970.
        start = time.time_ns()
        yield
        self._marks.append((name, start, time.time_ns()))

    def since(self, base_ns: int) -> list[Mark]:
        return [(name, (a - base_ns) / 1e6, (b - base_ns) / 1e6) for name, a, b in self._marks]


def note_timeline(
    bench: Bench, step: Callable[[Any], None], finish: Callable[[], None] = lambda: None
) -> None:
    """Run traced steps on all ranks and note their timeline.

    Args:
        finish: waits for work that the last step left to overlap with a next one. Work of a gloo
            thread that ends after the profiler has stopped would crash the process.
    """
    bench.stage("tracing")
    on_cuda = bench.device.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="attnbench-trace-") as folder:
        path = Path(folder) / "trace.json"
        plan = schedule(wait=0, warmup=1, active=1, repeat=1)
        with profile(
            activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU],
            schedule=plan,
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        ) as profiler:
            for steps in (1, STEPS):
                bench.barrier()
                phases = _Phases()
                for _ in range(steps):
                    with phases.phase(STEP):
                        step(phases)
                finish()
                bench.synchronize()
                profiler.step()
        trace = json.loads(path.read_text(encoding="utf-8"))
    base_ns = trace.get("baseTimeNanoseconds", 0)
    thread = None if on_cuda else threading.get_native_id()
    spans, origin = spans_of(trace["traceEvents"], phases.since(base_ns), thread)
    origin += base_ns / 1e6
    found = bench.gather((platform.node(), origin, spans))
    bench.outcome.notes["timeline"] = [[{"spans": part} for part in _on_one_clock(found)]]


def _on_one_clock(ranks: list[tuple[str, float, list[list[Any]]]]) -> list[list[list[Any]]]:
    """The spans of all ranks, measured from when the first rank of their host began its first step.

    Ranks of one host share a clock; hosts began together to within the length of a barrier.
    """
    first: dict[str, float] = {}
    for host, origin, _ in ranks:
        first[host] = min(origin, first.get(host, origin))
    return [
        [
            [*span[:3], *(round(time + origin - first[host], 3) for time in span[3:])]
            for span in spans
        ]
        for host, origin, spans in ranks
    ]


def spans_of(
    events: list[Event], marks: list[Mark], thread: int | None
) -> tuple[list[list[Any]], float]:
    """The spans of the middle traced step, and when the first traced step began.

    Args:
        events: the events of a trace in Chrome's format.
        marks: the host's steps and their phases.
        thread: the thread that computes on a CPU; None on CUDA.

    Returns:
        Spans in ms from the beginning of the first step, and that beginning in ms of the trace's
        clock.
    """
    events = [event for event in events if event.get("ph") == "X"]
    steps = sorted((start, end) for name, start, end in marks if name == STEP)
    phases = _Places([mark for mark in marks if mark[0] not in (STEP, "communication")])
    activity = _on_cuda(events) if thread is None else _on_cpu(events, thread)
    # The time of its launch decides to which step and phase an activity belongs.
    computing = [
        (phases.at(when), start, end) for kind, when, start, end in activity if kind == COMPUTE
    ]
    starts = [
        min(
            (
                times[0]
                for kind, when, *times in activity
                if kind == COMPUTE and begin <= when < end
            ),
            default=begin,
        )
        for begin, end in steps
    ]
    window = starts[STEPS // 2], starts[STEPS // 2 + 1]
    origin = steps[0][0]
    spans: list[tuple[str, str, int, float, float]] = []
    for name in dict.fromkeys(name for name, _, _ in phases.places):
        mine = [(start, end) for phase, start, end in computing if phase == name]
        busy = union(clipped(mine, *window), close_gaps=CLOSED_GAP_MS)
        spans += [(name, COMPUTE, number, *times) for number, times in enumerate(busy)]
    transfers = sorted(
        (start, end, phase)
        for kind, when, start, end in activity
        for phase in [phases.at(when)]
        if kind == COMMUNICATION and phase is not None
    )
    number = 0
    for start, end, name in transfers:
        for part in clipped([(start, end)], *window):
            spans.append((name, COMMUNICATION, number, *part))
            number += 1
    return [
        [phase, kind, number, round(start - origin, 3), round(end - origin, 3)]
        for phase, kind, number, start, end in spans
    ], origin


class _Places:
    """The host's phases in time, to look up the phase of a moment."""

    def __init__(self, places: list[Mark]) -> None:
        self.places = sorted(places, key=lambda place: place[1])
        self._starts = [start for _, start, _ in self.places]

    def at(self, moment: float) -> str | None:
        index = bisect_right(self._starts, moment) - 1
        if index < 0:
            return None
        name, _, end = self.places[index]
        return name if moment <= end else None


def _times(event: Event) -> tuple[float, float]:
    """Start and end in milliseconds."""
    start = float(event["ts"]) / 1e3
    return start, start + float(event.get("dur", 0.0)) / 1e3


_Activity = tuple[str, float, float, float]
"""compute or communication, when it was launched, start and end."""


def _on_cuda(events: list[Event]) -> list[_Activity]:
    launches = {
        event["args"]["correlation"]: _times(event)[0]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launched = launches.get(event["args"].get("correlation"))
        if launched is not None:
            is_nccl = str(event["name"]).lower().startswith("nccl")
            found.append((COMMUNICATION if is_nccl else COMPUTE, launched, *_times(event)))
    return found


def _on_cpu(events: list[Event], thread: int) -> list[_Activity]:
    found = []
    for event in events:
        times = _times(event)
        if str(event["name"]).startswith("gloo:"):
            found.append((COMMUNICATION, times[0], *times))
        elif (
            event.get("cat") == "cpu_op"
            and event["tid"] == thread
            and not str(event["name"]).startswith("c10d::")
        ):
            found.append((COMPUTE, times[0], *times))
    return found
