"""A trace as columns of spans, the common form of torch.profiler's and Nsight Systems' traces.

A trace has millions of spans. Each becomes a few numbers in arrays, under 100 bytes where the
file has 300 to 500.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.profilers.kernels.categories import Cost

STEP, WARM_UP = "step", "warm-up"
"""Names of the ranges around a profiled step and around those before it."""


class NumberedTexts:
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
class SpanColumns:
    """Spans of time as columns of numbers, eight bytes each."""

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
class ProfileTrace:
    """Spans of the host and of the device, and the links between them.

    Args:
        phases: names of the ranges that are phases of a step.
    """

    phases: tuple[str, ...]
    names: NumberedTexts = field(default_factory=NumberedTexts)
    operators: SpanColumns = field(default_factory=SpanColumns)
    """``extra`` is one more than the operator's place in ``costs``, or 0."""
    ranges: SpanColumns = field(default_factory=SpanColumns)
    launches: SpanColumns = field(default_factory=SpanColumns)
    """Calls of the CUDA runtime; ``extra`` is the correlation that their kernels have."""
    kernels: SpanColumns = field(default_factory=SpanColumns)
    """``extra`` is the correlation."""
    link_starts: SpanColumns = field(default_factory=SpanColumns)
    """The start of a forward operator; ``extra`` is the link's number."""
    link_ends: SpanColumns = field(default_factory=SpanColumns)
    """The start of the operator that computes its gradient."""
    costs: list[Cost] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Windows:
    """Start and end of each profiled step and of the phases in it."""

    steps: list[tuple[float, float]]
    phases: list[tuple[float, float, str]]

    def step_of(self, moment: float) -> int | None:
        """Index of the step at a moment; None during warm-up and between steps."""
        place = bisect_right(self.steps, (moment, float("inf"))) - 1
        return place if place >= 0 and moment <= self.steps[place][1] else None

    def phase_of(self, moment: float) -> str:
        """The innermost phase at a moment; empty between phases."""
        place = bisect_right(self.phases, (moment, float("inf"), "")) - 1
        # Phases nest at most once: forward and backward inside forward_backward.
        for index in range(place, max(place - 3, -1), -1):
            start, end, name = self.phases[index]
            if start <= moment <= end:
                return name
        return ""


def windows_of(trace: ProfileTrace) -> Windows:
    """Steps and phases, from the ranges named after them."""
    steps = [(start, end) for start, end, name in _named_ranges(trace) if name == STEP]
    phases = [item for item in _named_ranges(trace) if item[2] in trace.phases]
    return Windows(steps=sorted(steps), phases=sorted(phases))


def _named_ranges(trace: ProfileTrace) -> Iterable[tuple[float, float, str]]:
    ranges = trace.ranges
    for start, duration, name in zip(ranges.start, ranges.duration, ranges.name, strict=True):
        yield start, start + duration, trace.names.texts[name]
