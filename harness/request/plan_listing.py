"""The list of cases that ``plan=true`` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.cases import format as fmt
from harness.cases.case import Case
from harness.predictions.capacity import GIB, why_not
from harness.predictions.support import Support
from harness.request.compose import Request
from harness.request.plan import PlannedCases, further_rounds_s
from harness.request.plan_columns import (
    headers_of,
    in_blocks,
    in_one_column,
    keys_of,
    numeric,
)
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
    """Print every case with its predicted memory and time, and whether it is recorded.

    There is a table for each task and number of passes. Its columns are the keys in which the
    cases differ; the line above it has what they have in common.
    """
    states = case_states(request, plan, predict)
    for cases in in_blocks(request.cases):
        columns, same = keys_of(cases)
        if _width(columns) + OTHER_COLUMNS > console.width:
            columns = in_one_column(cases, columns)
        console.print(f"{fmt.counted(len(cases), 'case')} of {same}", highlight=False)
        console.print(_table(cases, columns, predict, states))
        console.print()
    todo = [case for case in plan.todo if states[case.id].startswith(TO_MEASURE)]
    total = sum(map(predict, todo)) + predicted_starts_s(todo, request.options)
    further = further_rounds_s(request.options, total) if todo else 0.0
    until = f", and up to {minutes(further)} more until decided" if further else ""
    if cannot := len(plan.todo) - len(todo):
        console.print(f"{fmt.counted(cannot, 'case')} would end without a time", highlight=False)
    console.print(
        f"{len(todo)} of {fmt.counted(len(request.cases), 'case')} to measure on "
        f"{request.cases[0].device}, predicted time {minutes(total)}{until}; memory and time are "
        "predictions from formulas",
        highlight=False,
    )


OTHER_COLUMNS = len("0.00763  00.000  to measure")
"""Characters of a row behind the columns of keys."""


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    """Characters of the columns of keys, with two between them."""
    headers = headers_of(list(columns))
    widest = [
        max(map(len, [header, *values]))
        for header, values in zip(headers, columns.values(), strict=True)
    ]
    return sum(width + 2 for width in widest)


def _table(
    cases: Sequence[Case],
    columns: Mapping[str, Sequence[str]],
    predict: Callable[[Case], float],
    states: Mapping[str, str],
) -> Table:
    """A row for each case: the values of its columns, its predictions and its state."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header, values in zip(headers_of(list(columns)), columns.values(), strict=True):
        table.add_column(header, overflow="fold", justify="right" if numeric(values) else "left")
    for header in ("memory\n(GiB)", "time\n(s)"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for case, *values in zip(cases, *columns.values(), strict=True):
        predicted = (_memory_gib(case), f"{predict(case):.3g}")
        # Text, so that rich looks for no markup in it.
        table.add_row(*map(Text, (*values, *predicted, states[case.id])))
    return table


def _memory_gib(case: Case) -> str:
    """The predicted peak on one rank; without a number where there is no formula."""
    predicted = case.task.predicted_memory(case)
    return fmt.ABSENT if predicted is None else fmt.number(sum(predicted.values()) / GIB)


TO_MEASURE = "to measure"


def case_states(
    request: Request, plan: PlannedCases, predict: Callable[[Case], float]
) -> dict[str, str]:
    """What a run would do with each case, by id: measure it, or why it would not give a time.

    Only a plan that names a machine asks for its memory, its devices and its backends.
    """
    states = {
        record.case_id: f"stale ({record.status})"
        if record.case_id in plan.staleness.stale
        else f"recorded ({record.status})"
        for record in plan.done
    }
    machine = request.machine
    support = None if machine is None else Support(machine)
    for case in plan.todo:
        why = plan.why_again.get(case.id) if request.options.remeasure == "stale" else None
        states[case.id] = f"{TO_MEASURE} ({why})" if why else TO_MEASURE
        if machine is None or support is None:
            continue
        reason = why_not(case, machine)
        if reason is None and case.task.attends and (unsupported := support.why_not(case)):
            reason = f"unsupported ({unsupported})"
        if reason is None and predict(case) > request.options.timeout_s:
            reason = f"exceeds timeout_s={request.options.timeout_s:g}"
        states[case.id] = reason or states[case.id]
    return states
