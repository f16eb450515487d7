"""The interface of profilers, which show where time or memory goes in passes of their own.

A profiled case is first measured like any other. Then the same steps run again under the
profiler, so that its cost is in none of the reported times. Its findings join the record's notes;
traces, snapshots and pages are files in ``profiles/CASE/`` of the results folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from harness.cases.column import CaseColumn
from kernels.registry import Registry

if TYPE_CHECKING:
    from harness.bench.bench import Bench
    from harness.bench.program import Program
    from harness.cases.case import Case

PROFILERS: Registry[type[Profiler]] = Registry(
    "profile", decorator="profiler", packages=("harness.profilers",)
)

profiler = PROFILERS.register


def require_steps(key: str, steps: int) -> None:
    """Raise ValueError unless at least one step is to be profiled."""
    if steps < 1:
        raise ValueError(f"{key}={steps}: must be at least 1")


@dataclass(kw_only=True, slots=True)
class Profiler:
    """A choice of ``profile=``; its fields are options."""

    name: str

    columns: ClassVar[tuple[CaseColumn, ...]] = ()
    """Columns that it adds to the frame."""

    def validate(self, case: Case) -> None:
        """Raise ValueError, naming the full key, if it makes no sense for the case."""

    def supports(self, case: Case) -> str | None:
        """None if it can run here, else the reason in one line."""
        return None

    def run(self, case: Case, bench: Bench, program: Program) -> None:
        """Profile the measured program on this rank, after the measurement; all ranks do."""

    def after(self, case: Case, bench: Bench) -> None:
        """Called once the task has ended and its memory is free."""
