"""Records what PyTorch's CUDA allocator does, with stacks and the ranges of the program.

Where a range begins and ends is told by the allocator's own counters, which number the entries
of its trace: no clock is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import record_function

from harness.profilers.allocations.snapshot import Mark


class Marker:
    """Makes ranges and keeps those whose name matters."""

    def __init__(self, device: torch.device, names: tuple[str, ...]) -> None:
        self.marks: list[Mark] = []
        self._device = device
        self._names = names
        self._first = self.count()
        self.counted = 0
        """Events of the recorded step."""

    def count(self) -> int:
        """Allocations and frees since the process started."""
        stats = torch.cuda.memory_stats(self._device)
        return int(stats["allocation.all.allocated"] + stats["allocation.all.freed"])

    def start(self) -> None:
        """Count from here."""
        self._first = self.count()

    def stop(self) -> None:
        """Note how many events there were."""
        self.counted = self.count() - self._first

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        # Snapshots keep the ranges of record_function for the online viewer.
        with record_function(name):
            if name not in self._names:
                yield
                return
            start = self.count() - self._first
            try:
                yield
            finally:
                end = self.count() - self._first
                self.marks.append(Mark(name=name, start=start, end=end))


def record(step: Callable[[], None], marker: Marker, device: torch.device) -> dict[str, Any]:
    """Run ``step`` once and return the snapshot of what it did."""
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
