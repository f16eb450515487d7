"""``profile=memory``: every allocation of one step, as a snapshot, a timeline and a table.

Beside the record stay the snapshot, which the viewer at pytorch.org/memory_viz reads, and a page
that shows the timeline in any browser without a network, one of each for every rank. The record
keeps a thinned timeline, the peak by category and the largest tensors at the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.cases.profiler import Profiler, profiler

if TYPE_CHECKING:
    from harness.bench.bench import Bench
    from harness.bench.program import Program
    from harness.cases.case import Case


@profiler("memory")
@dataclass(kw_only=True, slots=True)
class MemoryProfiler(Profiler):
    """A timeline of allocated memory."""

    max_events: int = 20_000
    """Points of the page's timeline, and allocations that it names; more are thinned."""
    points: int = 400
    """Points of the timeline that the record keeps."""
    largest: int = 10
    """Kinds of allocations at the peak that the record names; equal ones count as one."""

    def validate(self, case: Case) -> None:
        for key in ("max_events", "points", "largest"):
            value = getattr(self, key)
            if value < 1:
                raise ValueError(f"profile.{key}={value}: must be at least 1")

    def run(self, case: Case, bench: Bench, program: Program) -> None:
        from harness.profilers.allocations.step import profile_memory

        profile_memory(self, case, bench, program)
