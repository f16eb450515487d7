"""Tracing of a rank's timeline: spans of computing and of waiting for other ranks' data.

Attention runs with :data:`NO_TRACING`, which records nothing, except in the passes that a
timeline is made from. Spans on CUDA are between events of the stream that computes: a wait is
the time in which that stream had nothing to do but wait, so communication that hides behind
computing does not show.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from parallel.streams import SideStream, StreamEvent

COMPUTE, WAIT = "compute", "wait"


@dataclass(kw_only=True, slots=True, frozen=True)
class Span:
    """One activity of one rank."""

    phase: str
    """``forward`` or ``backward``."""
    kind: str
    """``compute`` or ``wait``."""
    step: int
    """The visit of keys, counted from the rank's own."""
    start_ms: float
    """Since the trace began."""
    end_ms: float


class Tracer:
    """Marks spans and sent bytes; this one records nothing."""

    def span(self, kind: str, step: int) -> contextlib.AbstractContextManager[None]:
        """Everything inside, on the current stream, is one span."""
        return contextlib.nullcontext()

    def sent(self, num_bytes: int) -> None:
        """Note bytes that leave this rank, or that a peer reads from it."""


NO_TRACING = Tracer()


class RecordingTracer(Tracer):
    """Records spans from its creation on, and counts bytes."""

    def __init__(self, device: torch.device) -> None:
        self.phase = "forward"
        """The phase of the spans that follow."""
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, str, int, Any, Any]] = []
        self.sent_bytes = 0
        self._begin = self._now()

    @contextlib.contextmanager
    def span(self, kind: str, step: int) -> Iterator[None]:
        start = self._now()
        yield
        self._marks.append((self.phase, kind, step, start, self._now()))

    def sent(self, num_bytes: int) -> None:
        self.sent_bytes += num_bytes

    def spans(self) -> list[Span]:
        """All spans so far, in order; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        return [
            Span(
                phase=phase,
                kind=kind,
                step=step,
                start_ms=self._since(start),
                end_ms=self._since(end),
            )
            for phase, kind, step, start, end in self._marks
        ]

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        if self._on_cuda:
            return float(self._begin.elapsed_time(moment))
        return float(moment - self._begin) * 1e3


@contextlib.contextmanager
def aside(stream: SideStream, tracer: Tracer, step: int, *events: StreamEvent) -> Iterator[None]:
    """Run on a side stream after events; where there is none, the time counts as waiting."""
    span = contextlib.nullcontext() if stream.runs_beside else tracer.span(WAIT, step)
    with stream.after(*events), span:
        yield
