"""What each rank computes and communicates when, from torch.profiler, beside the measured steps.

Three steps are profiled in a row, after the profiler has warmed up, and the middle one is kept:
from where it begins to compute until the next one does. So what the step before left to do in
it (an all-gather of ZeRO that hides behind the next forward pass) is seen, and so is what it
leaves itself.

On CUDA computing is every kernel but NCCL's, and communication NCCL's kernels, which include
the time that they wait for ranks that come late. PyTorch's operators are left out there: to
record thousands of them a step holds up a host that launches kernels at the last moment, and
then communication waits for it that is hidden in a step that nobody watches. On a CPU computing
is the operators of the thread that trains, and communication what gloo's threads do.

Noted in the record as ``timeline``, like that of split attention: for each pass and rank
``spans`` of [phase, compute or communication, number, start_ms, end_ms], from when the first
rank began the first of the three steps.
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
"""Gaps in computing that are no longer than this count as computing: launches, Python."""

Event = dict[str, Any]

Mark = tuple[str, float, float]
"""What the host does, and from when to when by the trace's own clock: milliseconds."""


class _Phases:
    """Stands in for a timer, and notes when the host was in which phase."""

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
    """Run traced steps on all ranks and note what they did.

    Args:
        finish: waits for what the last step has left to one that does not come. Work that ends
            after the profiler has stopped, on a thread of gloo's, would take the process along.
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
    """Spans of all ranks from when the first rank of their host began its first step.

    Ranks of one host share a clock; those of several began together, but for a barrier's length.
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
    """Spans of the middle one of the traced steps, and when the first of them began.

    Args:
        events: of a trace in Chrome's format.
        marks: steps of the host, and their phases.
        thread: which one computes on a CPU; None on CUDA.

    Returns:
        Spans in ms from the beginning on, and that in ms of the trace's own clock.
    """
    events = [event for event in events if event.get("ph") == "X"]
    steps = sorted((start, end) for name, start, end in marks if name == STEP)
    phases = _Places([mark for mark in marks if mark[0] not in (STEP, "communication")])
    activity = _on_cuda(events) if thread is None else _on_cpu(events, thread)
    # When each was launched decides which step and phase it is of.
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
    """Named times of the host, to look up what a moment belongs to."""

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
