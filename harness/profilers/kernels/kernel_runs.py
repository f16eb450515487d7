"""Every kernel of a profiled step, with the phase, the ranges and the operator that launched it.

A kernel belongs to the phase in which it was launched and to the ranges around its launch. In
the backward pass these are the ranges of the forward operator whose gradient it computes, which
the trace links to it. On a CPU operators stand for kernels, each with the time that it does not
spend in other operators.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.profilers.kernels.categories import Cost
from harness.profilers.kernels.profile_trace import STEP, WARM_UP, ProfileTrace, Windows


@dataclass(kw_only=True, slots=True, frozen=True)
class KernelRun:
    """One execution of a kernel, or of an operator on a CPU."""

    name: str
    operator: str | None
    """Innermost operator around the launch."""
    phase: str
    """Phase of the step; empty between phases."""
    path: tuple[str, ...]
    """Ranges around it, outermost first, with the numbers of blocks."""
    recomputed: bool
    """Whether it repeats a part of the forward pass in the backward pass."""
    step: int
    start_us: float
    duration_us: float
    operator_call: int
    """Number of the call of the operator, which may launch several kernels."""
    cost: Cost | None
    """Cost of the operator's whole call."""


@dataclass(slots=True)
class _Frame:
    """A span of the host that is open while its thread is walked in order of time."""

    end: float
    ranges: tuple[str, ...]
    """Ranges around it that its own thread opened."""
    path: tuple[str, ...]
    """``ranges``, or those of the forward operator that it is linked to."""
    linked: bool
    """Whether ``path`` comes from a link."""
    operator: int
    """Index of the innermost operator; -1 if there is none."""
    own_us: float
    """Time not spent in other operators."""
    is_operator: bool = False
    flops: float = 0.0
    """Of the operator by its shapes; 0 where these do not tell."""
    inner_flops: float = 0.0
    """Of the operators that it calls."""

    @property
    def is_composite(self) -> bool:
        """Whether others compute what it is said to compute.

        By FLOPs, since a busy machine makes any of them take longer.
        """
        return 2 * self.inner_flops >= self.flops > 0


_RANGE, _OPERATOR, _LAUNCH, _LINK_START, _LINK_END = range(5)

_NOWHERE = _Frame(float("inf"), (), (), False, -1, 0.0)


class _HostWalk:
    """Walks the nested spans of each host thread once, in order of time.

    A first walk, without ``links``, finds the ranges around forward operators. A second one is
    given them, by the number of the link, as the ranges of the backward operators.
    """

    def __init__(
        self, trace: ProfileTrace, links: dict[int, tuple[str, ...]] | None = None
    ) -> None:
        self._trace = trace
        self._links = links
        self._not_parts = {STEP, WARM_UP, *trace.phases}
        self.found_links: dict[int, tuple[str, ...]] = {}
        self._places: dict[tuple[tuple[str, ...], bool], int] = {}
        self.paths: list[tuple[tuple[str, ...], bool]] = []
        """Distinct paths, and whether each comes from a link."""
        self.launch_path = array("q", bytes(8 * len(trace.launches)))
        """Index in ``paths`` of each launch."""
        self.launch_operator = array("q", bytes(8 * len(trace.launches)))

    def operators(self) -> Iterator[_Frame]:
        """Walk, and yield each operator when it ends."""
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
            if name not in self._not_parts:
                ranges = (*ranges, name)
            stack.append(_Frame(start + duration, ranges, ranges, False, top.operator, 0.0))
        elif kind == _OPERATOR:
            caller = _innermost_operator(stack)
            if caller is not None:
                caller.own_us -= duration
            end = start + duration
            frame = _Frame(end, top.ranges, top.path, top.linked, place, duration, True)
            cost = trace.operators.extra[place]
            frame.flops = trace.costs[cost - 1].flops if cost else 0.0
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


def _innermost_operator(stack: list[_Frame]) -> _Frame | None:
    return next((frame for frame in reversed(stack) if frame.is_operator), None)


def _close(stack: list[_Frame], moment: float) -> Iterator[_Frame]:
    """Close the spans that end by ``moment``, and yield the operators among them."""
    while stack and stack[-1].end <= moment:
        frame = stack.pop()
        if frame.is_operator:
            caller = _innermost_operator(stack)
            if caller is not None:
                caller.inner_flops += max(frame.flops, frame.inner_flops)
            yield frame


def runs_of(trace: ProfileTrace, windows: Windows) -> Iterator[KernelRun]:
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
            # The cost of a composite operator is that of the operators that it calls.
            yield replace(run, cost=None) if frame.is_composite else run


def _kernel_runs(trace: ProfileTrace, windows: Windows, walk: _HostWalk) -> Iterator[KernelRun]:
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
    trace: ProfileTrace,
    windows: Windows,
    name: str,
    step: int,
    moment: float,
    span: tuple[float, float],
    place: tuple[tuple[str, ...], bool],
    operator: int,
) -> KernelRun:
    phase = windows.phase_of(moment)
    path, linked = place
    cost = trace.operators.extra[operator] if operator >= 0 else 0
    names = trace.names.texts
    return KernelRun(
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
