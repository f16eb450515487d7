"""Records PyTorch's CUDA allocator during a step, with stacks and the step's named ranges.

A range begins and ends at an allocator event, by the allocator's counters of allocations and
frees; no clock is involved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import record_function

from harness.profilers.memory.timeline import EventSpan


class RangeMarker:
    """Makes ranges, and keeps the event spans of those with given names."""

    def __init__(self, device: torch.device, names: tuple[str, ...]) -> None:
        self.marks: list[EventSpan] = []
        self._device = device
        self._names = names
        self._first = self.count()
        self.counted = 0
        """Allocator events of the recorded step."""

    def count(self) -> int:
        """Allocations and frees since the process started."""
        stats = torch.cuda.memory_stats(self._device)
        return int(stats["allocation.all.allocated"] + stats["allocation.all.freed"])

    def start(self) -> None:
        """Count events from here."""
        self._first = self.count()

    def stop(self) -> None:
        """Note the number of events since :meth:`start`."""
        self.counted = self.count() - self._first

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        # Ranges of record_function are in the snapshot too, for the online viewer.
        with record_function(name):
            if name not in self._names:
                yield
                return
            start = self.count() - self._first
            try:
                yield
            finally:
                end = self.count() - self._first
                self.marks.append(EventSpan(name=name, start=start, end=end))


def record(step: Callable[[], None], marker: RangeMarker, device: torch.device) -> dict[str, Any]:
    """Run ``step`` once, and return the allocator's snapshot of it."""
    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python")
    try:
        marker.start()
        step()
        torch.cuda.synchronize(device)
        marker.stop()
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return snapshot
