"""Times the phases of a step on one rank: forward, backward, optimizer, and the like."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Moment(NamedTuple):
    """The start or the end of a phase."""

    host_s: float
    """When the host came there, by perf_counter."""
    event: Any
    """The CUDA event that it recorded on the device's stream; None on a CPU."""


class PhaseTimer:
    """Times named phases of a step, by CUDA events or on a CPU by perf_counter.

    Events are made beforehand (:meth:`reserve`) and reused: creating one inside the timed region
    would cost the host as much as a kernel launch. On CUDA the host's own time between the same
    two moments is how long it took to enqueue the phase.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: list[tuple[str, Moment, Moment]] = []
        """Name, and the moments of its start and end."""
        self._spare: list[Any] = []
        self._recorded: list[Any] = []

    def reserve(self, num_phases: int) -> None:
        """Create the events that ``num_phases`` phases need."""
        if not self._on_cuda:
            return
        while len(self._spare) < 2 * num_phases:
            event = torch.cuda.Event(enable_timing=True)
            # CUDA creates an event when it is first recorded.
            event.record()
            self._spare.append(event)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the work that the block puts on the device's stream, as one sample of ``name``."""
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    @contextlib.contextmanager
    def phases(self, whole: str) -> Iterator[Callable[[str], None]]:
        """Time consecutive phases, and all of them together as ``whole``.

        The block calls the yielded function with a phase's name where it begins, which is also
        where the phase before ends: one event serves both, which halves the host's work.
        """
        began: list[tuple[str, Moment]] = []

        def begins(name: str) -> None:
            began.append((name, self._now()))

        yield begins
        end = self._now()
        ends = [*(start for _, start in began[1:]), end]
        for (name, start), stop in zip(began, ends, strict=True):
            self._spans.append((name, start, stop))
        self._spans.append((whole, began[0][1], end))

    def _now(self) -> Moment:
        """The present moment, with an event recorded on the device's stream."""
        if not self._on_cuda:
            return Moment(time.perf_counter(), None)
        if not self._spare:
            self.reserve(1)
        event = self._spare.pop()
        host_s = time.perf_counter()
        event.record()
        self._recorded.append(event)
        return Moment(host_s, event)

    def collect(self) -> dict[str, list[float]]:
        """Milliseconds of every sample by phase, in order. Call after a synchronisation."""
        return self.collect_with_host()[0]

    def collect_with_host(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Milliseconds of every sample by phase, and on CUDA those in which the host enqueued it.

        Call after a synchronisation.
        """
        samples: dict[str, list[float]] = {}
        host: dict[str, list[float]] = {}
        for name, start, end in self._spans:
            enqueued_ms = (end.host_s - start.host_s) * 1e3
            if self._on_cuda:
                samples.setdefault(name, []).append(start.event.elapsed_time(end.event))
                host.setdefault(name, []).append(enqueued_ms)
            else:
                samples.setdefault(name, []).append(enqueued_ms)
        self._spans.clear()
        self._spare += self._recorded
        self._recorded.clear()
        return samples, host
