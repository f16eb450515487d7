"""Times the phases of a step on one rank: forward, backward, optimizer, and the like."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


class PhaseTimer:
    """Times named phases of a step, by CUDA events or on a CPU by perf_counter.

    Events are made beforehand (:meth:`reserve`) and reused: creating one inside the timed region
    would cost the host as much as a kernel launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
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
        began: list[tuple[str, Any]] = []

        def begins(name: str) -> None:
            began.append((name, self._now()))

        yield begins
        end = self._now()
        ends = [*(start for _, start in began[1:]), end]
        for (name, start), stop in zip(began, ends, strict=True):
            self._spans.append((name, start, stop))
        self._spans.append((whole, began[0][1], end))

    def _now(self) -> Any:
        """An event recorded on the device's stream now; on a CPU, the time."""
        if not self._on_cuda:
            return time.perf_counter()
        if not self._spare:
            self.reserve(1)
        event = self._spare.pop()
        event.record()
        self._recorded.append(event)
        return event

    def collect(self) -> dict[str, list[float]]:
        """Milliseconds of every sample by phase, in order. Call after a synchronisation."""
        samples: dict[str, list[float]] = {}
        for name, start, end in self._spans:
            elapsed = start.elapsed_time(end) if self._on_cuda else (end - start) * 1e3
            samples.setdefault(name, []).append(elapsed)
        self._spans.clear()
        self._spare += self._recorded
        self._recorded.clear()
        return samples
