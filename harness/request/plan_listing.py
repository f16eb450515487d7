"""The list of cases that ``plan=true`` prints."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from harness.cases import format as fmt
from harness.cases.case import Case
from harness.request.compose import Request
from harness.request.plan import PlannedCases, further_rounds_s
from harness.run.warm_workers import predicted_starts_s


def minutes(seconds: float) -> str:
    """A predicted time as text."""
    return f"{seconds / 60:.1f} min"


def print_plan(
    console: Console,
    request: Request,
    plan: PlannedCases,
    predict: Callable[[Case], float],
) -> None:
    """Print every case with its predicted memory and time, and whether it is recorded."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("case", overflow="fold")
    for header in ("memory (GiB)", "time (s)"):
        table.add_column(header, justify="right")
    table.add_column("state")
    states = {record.case_id: record.status for record in plan.done}

    def memory_gib(case: Case) -> str:
        predicted = case.task.predicted_memory(case)
        return "not predicted" if predicted is None else f"{sum(predicted.values()) / 2**30:.3g}"

    for case in request.cases:
        state = states.get(case.id, "to measure")
        table.add_row(case.title, memory_gib(case), f"{predict(case):.3g}", state)
    console.print(table)
    total = sum(map(predict, plan.todo)) + predicted_starts_s(plan.todo, request.options)
    further = further_rounds_s(request.options, total) if plan.todo else 0.0
    until = f", and up to {minutes(further)} more until decided" if further else ""
    console.print(
        f"{len(plan.todo)} of {fmt.counted(len(request.cases), 'case')} to measure on "
        f"{request.cases[0].device}, predicted time {minutes(total)}{until}; memory and time are "
        "predictions from formulas",
        highlight=False,
    )
