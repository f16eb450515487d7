"""The profile that a case asks for, taken after its measured passes."""

from __future__ import annotations

from harness.bench.bench import Bench
from harness.bench.program import Program
from harness.cases.case import Case


def profile_if_asked(case: Case, bench: Bench, program: Program) -> None:
    """Run the case's profiler on a program, once, in the case's last round."""
    if case.profile is not None and bench.in_last_round:
        case.profile.run(case, bench, program)
