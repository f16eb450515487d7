"""No profile, the default: nothing beyond the measurement."""

from __future__ import annotations

from dataclasses import dataclass

from harness.cases.profiler import Profiler, profiler


@profiler("none")
@dataclass(kw_only=True, slots=True)
class NoProfiler(Profiler):
    """Measures only."""
