"""Reads a profiler's trace, of any size, into rows of kernels by phase and range.

A trace of torch.profiler is JSON in Chrome's trace format, easily hundreds of megabytes. It is
decoded one event at a time, and of each event a few numbers are kept: under 100 bytes, where
the file has 300 to 500. A kernel belongs to the phase in which it was launched, and to the
ranges around its launch; in the backward pass to those of the forward operator whose gradient
it computes, which the trace links to it. On a CPU operators are the kernels, each with the time
that it does not spend in others.
"""

from __future__ import annotations

import gzip
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.profilers.traces.categories import Cost, operator_cost

CHUNK = 1 << 20

STEP, WARM_UP = "step", "warm-up"

PHASES = ("forward", "backward", "optimizer", "forward_backward", "prefill", "decode")

_NOT_OURS = ("ProfilerStep#", "Optimizer.", "nccl:", "gloo:", "## ", "Torch-Compiled", "Pregraph")
"""Annotations that PyTorch makes itself."""

_KERNEL_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")


def trace_events(path: Path) -> Iterator[dict[str, Any]]:
    """The trace events of a file, plain or gzipped, one at a time.

    Raises ValueError that names the file if it is not a whole trace.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        try:
            yield from _array_elements(file, '"traceEvents"')
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: not a whole Chrome trace ({error})") from error


def _array_elements(file: IO[str], key: str) -> Iterator[Any]:
    """Elements of the JSON array behind ``key``, holding a chunk of text at a time."""
    decoder = json.JSONDecoder()
    text = ""
    while (start := text.find(key)) < 0:
        chunk = file.read(CHUNK)
        if not chunk:
            raise ValueError(f"without {key}")
        text = text[-len(key) :] + chunk
    text = text[start + len(key) :]
    while "[" not in text:
        text += file.read(CHUNK) or "["
    position = text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position < len(text) and text[position] == "]":
            return
        try:
            element, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            chunk = file.read(CHUNK)
            if not chunk:
                raise ValueError("it ends in the middle") from None
            text, position = text[position:] + chunk, 0
            continue
        yield element


class Names:
    """Numbers for texts that recur."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


@dataclass(slots=True)
class Columns:
    """Spans of time in columns of numbers: eight bytes each."""

    thread: array[int] = field(default_factory=lambda: array("q"))
    start: array[float] = field(default_factory=lambda: array("d"))
    """Microseconds."""
    duration: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("q"))
    extra: array[int] = field(default_factory=lambda: array("q"))
    """Number of an operator's cost, a correlation, or a link."""

    def add(self, thread: int, start: float, duration: float, name: int, extra: int) -> None:
        self.thread.append(thread)
        self.start.append(start)
        self.duration.append(duration)
        self.name.append(name)
        self.extra.append(extra)

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class Trace:
    """What of a trace is needed, whichever program wrote it."""

    names: Names = field(default_factory=Names)
    operators: Columns = field(default_factory=Columns)
    """Their ``extra`` is one more than the place in ``costs``, or 0."""
    ranges: Columns = field(default_factory=Columns)
    launches: Columns = field(default_factory=Columns)
    """Calls of the CUDA runtime; ``extra`` is the correlation that their kernels have."""
    kernels: Columns = field(default_factory=Columns)
    """``extra`` is the correlation."""
    link_starts: Columns = field(default_factory=Columns)
    """Where a forward operator begins; ``extra`` is the link's number."""
    link_ends: Columns = field(default_factory=Columns)
    """Where the operator that computes its gradient begins."""
    costs: list[Cost] = field(default_factory=list)


def read_chrome_trace(path: Path) -> Trace:
    """The trace that torch.profiler exported; ValueError that names the file if it is broken."""
    trace = Trace()
    threads = Names()
    costs: dict[tuple[str, str, str], int] = {}
    for event in trace_events(path):
        kind = event.get("cat")
        thread = threads.number(f"{event.get('pid')}/{event.get('tid')}")
        start, duration = float(event.get("ts", 0)), float(event.get("dur", 0))
        name, values = str(event.get("name", "")), event.get("args") or {}
        if kind == "cpu_op":
            cost = _number_of_cost(name, values, costs, trace.costs)
            trace.operators.add(thread, start, duration, trace.names.number(name), cost)
        elif kind == "user_annotation":
            if not name.startswith(_NOT_OURS):
                trace.ranges.add(thread, start, duration, trace.names.number(name), 0)
        elif kind in _LAUNCH_KINDS:
            number = int(values.get("correlation", 0))
            trace.launches.add(thread, start, duration, trace.names.number(name), number)
        elif kind in _KERNEL_KINDS:
            number = int(values.get("correlation", 0))
            trace.kernels.add(thread, start, duration, trace.names.number(name), number)
        elif kind == "fwdbwd":
            ends = trace.link_starts if event.get("ph") == "s" else trace.link_ends
            ends.add(thread, start, 0.0, 0, int(event["id"]))
    return trace


def _number_of_cost(
    name: str, values: dict[str, Any], known: dict[tuple[str, str, str], int], costs: list[Cost]
) -> int:
    dims, types = values.get("Input Dims"), values.get("Input type")
    if not dims or not types:
        return 0
    key = (name, str(dims), str(types))
    if key not in known:
        cost = operator_cost(name, dims, types)
        if cost is not None:
            costs.append(cost)
        known[key] = 0 if cost is None else len(costs)
    return known[key]


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """One execution of a kernel, or of an operator on a CPU."""

    name: str
    operator: str | None
    """Innermost operator around the launch."""
    phase: str
    """Of the step; empty between phases."""
    path: tuple[str, ...]
    """Ranges, outermost first, with the numbers of blocks."""
    recomputed: bool
    """Whether it repeats a part of the forward pass in the backward pass."""
    step: int
    start_us: float
    duration_us: float
    operator_call: int
    """Number of the operator's call, which may launch several kernels."""
    cost: Cost | None
    """Of the operator's whole call."""


@dataclass(kw_only=True, slots=True)
class Windows:
    """The steps of a trace and their phases; what is warm-up or outside is left out."""

    steps: list[tuple[float, float]]
    phases: list[tuple[float, float, str]]

    def step_of(self, moment: float) -> int | None:
        place = bisect_right(self.steps, (moment, float("inf"))) - 1
        return place if place >= 0 and moment <= self.steps[place][1] else None

    def phase_of(self, moment: float) -> str:
        """The innermost phase at a moment."""
        place = bisect_right(self.phases, (moment, float("inf"), "")) - 1
        # Phases nest at most once: forward and backward inside forward_backward.
        for index in range(place, max(place - 3, -1), -1):
            start, end, name = self.phases[index]
            if start <= moment <= end:
                return name
        return ""


def windows_of(trace: Trace) -> Windows:
    """Steps and phases by the ranges that say so."""
    steps, phases = [], []
    ranges = trace.ranges
    for index in range(len(ranges)):
        name = trace.names.texts[ranges.name[index]]
        start, end = ranges.start[index], ranges.start[index] + ranges.duration[index]
        if name == STEP:
            steps.append((start, end))
        elif name in PHASES:
            phases.append((start, end, name))
    return Windows(steps=sorted(steps), phases=sorted(phases))


@dataclass(slots=True)
class _Frame:
    """One open span of the host while a thread is gone through in order of time."""

    end: float
    ranges: tuple[str, ...]
    """Ranges around it that the thread itself opened."""
    path: tuple[str, ...]
    """The same, or those of the forward operator that it is linked to."""
    linked: bool
    operator: int
    """Place of the innermost operator; -1 without."""
    own_us: float
    """Time that it does not spend in other operators."""
    is_operator: bool = False


_RANGE, _OPERATOR, _LAUNCH, _LINK_START, _LINK_END = range(5)

_NOWHERE = _Frame(float("inf"), (), (), False, -1, 0.0)


class _HostWalk:
    """Goes through the spans of each host thread once, nested as they are.

    Forward operators are found by ranges alone, in a first walk without ``links``; the second
    one knows which ranges the operators of the backward pass are linked to.
    """

    def __init__(self, trace: Trace, links: dict[int, tuple[str, ...]] | None = None) -> None:
        self._trace = trace
        self._links = links
        self.found_links: dict[int, tuple[str, ...]] = {}
        self._places: dict[tuple[tuple[str, ...], bool], int] = {}
        self.paths: list[tuple[tuple[str, ...], bool]] = []
        """Distinct places in the program, and whether a link led there."""
        self.launch_path = array("q", bytes(8 * len(trace.launches)))
        """Of each launch, the place in ``paths``."""
        self.launch_operator = array("q", bytes(8 * len(trace.launches)))

    def operators(self) -> Iterator[_Frame]:
        """Walks; yields each operator when it ends."""
        trace = self._trace
        kinds = [(_RANGE, trace.ranges)]
        if self._links is None:
            kinds += [(_LINK_START, trace.link_starts)]
        else:
            kinds += [(_OPERATOR, trace.operators), (_LAUNCH, trace.launches)]
            kinds += [(_LINK_END, trace.link_ends)]
        thread = _joined([c.thread for _, c in kinds], np.int32)
        start = _joined([c.start for _, c in kinds], np.float64)
        duration = _joined([c.duration for _, c in kinds], np.float64)
        kind = np.repeat(
            np.array([number for number, _ in kinds], np.int8), [len(c) for _, c in kinds]
        )
        place = np.concatenate([np.arange(len(c), dtype=np.int32) for _, c in kinds])
        stack: list[_Frame] = []
        current = None
        for index in np.lexsort((kind, -duration, start, thread)):
            if thread[index] != current:
                yield from _close(stack, float("inf"))
                current = thread[index]
            begin = float(start[index])
            yield from _close(stack, begin)
            self._enter(stack, int(kind[index]), int(place[index]), begin, float(duration[index]))
        yield from _close(stack, float("inf"))

    def _enter(
        self, stack: list[_Frame], kind: int, place: int, start: float, duration: float
    ) -> None:
        trace = self._trace
        top = stack[-1] if stack else _NOWHERE
        if kind == _RANGE:
            name = trace.names.texts[trace.ranges.name[place]]
            ranges = top.ranges
            if name not in (STEP, WARM_UP, *PHASES):
                ranges = (*ranges, name)
            stack.append(_Frame(start + duration, ranges, ranges, False, top.operator, 0.0))
        elif kind == _OPERATOR:
            for frame in reversed(stack):
                if frame.is_operator:
                    frame.own_us -= duration
                    break
            end = start + duration
            frame = _Frame(end, top.ranges, top.path, top.linked, place, duration, True)
            stack.append(frame)
        elif kind == _LAUNCH:
            self.launch_path[place] = self._number(top.path, top.linked)
            self.launch_operator[place] = top.operator
        elif kind == _LINK_START:
            self.found_links[trace.link_starts.extra[place]] = top.ranges
        elif stack and self._links is not None:
            # The link sorts behind the operator that begins at the same moment.
            path = self._links.get(trace.link_ends.extra[place])
            if path is not None:
                stack[-1].path, stack[-1].linked = path, True

    def _number(self, path: tuple[str, ...], linked: bool) -> int:
        key = (path, linked)
        if key not in self._places:
            self._places[key] = len(self.paths)
            self.paths.append(key)
        return self._places[key]


def _joined(columns: list[array[Any]], dtype: type) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(column, dtype=dtype) for column in columns])


def _close(stack: list[_Frame], moment: float) -> Iterator[_Frame]:
    """End what ends by ``moment``, and yield the operators of it."""
    while stack and stack[-1].end <= moment:
        frame = stack.pop()
        if frame.is_operator:
            yield frame


def runs_of(trace: Trace, windows: Windows) -> Iterator[Run]:
    """Every kernel of the steps, or every operator where no device ran kernels."""
    first = _HostWalk(trace)
    for _ in first.operators():
        pass
    walk = _HostWalk(trace, first.found_links)
    if len(trace.kernels):
        yield from _kernel_runs(trace, windows, walk)
        return
    for frame in walk.operators():
        start = trace.operators.start[frame.operator]
        step = windows.step_of(start)
        if step is not None:
            name = trace.names.texts[trace.operators.name[frame.operator]]
            span = (start, max(0.0, frame.own_us))
            place = (frame.path, frame.linked)
            run = _run(trace, windows, name, step, start, span, place, frame.operator)
            # What it must do, others do for it.
            others_do = span[1] < trace.operators.duration[frame.operator] / 2
            yield replace(run, cost=None) if others_do else run


def _kernel_runs(trace: Trace, windows: Windows, walk: _HostWalk) -> Iterator[Run]:
    for _ in walk.operators():
        pass
    kernels, launches = trace.kernels, trace.launches
    correlations = np.asarray(launches.extra)
    order = np.argsort(correlations, kind="stable")
    found = np.searchsorted(correlations[order], np.asarray(kernels.extra))
    for index in range(len(kernels)):
        span = (kernels.start[index], kernels.duration[index])
        moment, place, operator = span[0], ((), False), -1
        if found[index] < len(order) and (
            correlations[launch := order[found[index]]] == kernels.extra[index]
        ):
            moment = launches.start[launch]
            place = walk.paths[walk.launch_path[launch]]
            operator = walk.launch_operator[launch]
        step = windows.step_of(moment)
        if step is not None:
            name = trace.names.texts[kernels.name[index]]
            yield _run(trace, windows, name, step, moment, span, place, operator)


def _run(
    trace: Trace,
    windows: Windows,
    name: str,
    step: int,
    moment: float,
    span: tuple[float, float],
    place: tuple[tuple[str, ...], bool],
    operator: int,
) -> Run:
    phase = windows.phase_of(moment)
    path, linked = place
    cost = trace.operators.extra[operator] if operator >= 0 else 0
    names = trace.names.texts
    return Run(
        name=name,
        operator=names[trace.operators.name[operator]] if operator >= 0 else None,
        phase=phase,
        path=path,
        recomputed=phase == "backward" and bool(path) and not linked,
        step=step,
        start_us=span[0],
        duration_us=span[1],
        operator_call=operator,
        cost=trace.costs[cost - 1] if cost else None,
    )
