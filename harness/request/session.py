"""One run of a request, from the records that exist to the report."""

from __future__ import annotations

import sys
from collections import Counter

from rich.console import Console
from rich.table import Table

from harness.cases import format as fmt
from harness.cases.case import Case
from harness.request.compose import Request
from harness.request.plan import Plan, make_plan, predicted_seconds, sweep_plan
from harness.run.hosts import HostError
from harness.run.launcher import LaunchError, PendingCases
from harness.run.progress import TerminalProgress
from harness.run.worker_group import WorkerStartError
from harness.store.record import RecordStore, in_short
from harness.store.rounds import RoundStore
from harness.store.sweep_plan import write_plan

LONG_S = 30.0
"""Predicted seconds beyond which a command says beforehand how long it takes."""


def run_request(request: Request) -> int:
    """Run or print the plan, record, render and summarise; returns the exit code."""
    console = Console(soft_wrap=False)
    results = request.options.results
    store = RecordStore(results)
    if not request.plan:
        try:
            store.create()
            RoundStore(store).tidy()
            write_plan(results, sweep_plan(request))
        except OSError as error:
            return _complain(f"results={results}: cannot be written ({error.strerror})", 2)
    records, problems = store.load()
    for problem in in_short(problems):
        print(f"attnbench: {problem}; measured again", file=sys.stderr)
    plan = make_plan(request, records)
    if request.plan:
        _print_plan(console, request, plan)
        return 0

    device_name = _device_name(request)

    def predict(case: Case) -> float:
        return predicted_seconds(case, device_name, request.options.interleave)

    console.print(_opening(request, plan, sum(map(predict, plan.todo))), highlight=False)

    with TerminalProgress(console, plan.todo, predict) as progress:
        pending = PendingCases(
            cases=plan.todo,
            options=request.options,
            store=store,
            progress=progress,
            command=request.command,
            predict=predict,
        )
        try:
            said = request.launcher.launch(pending)
        except (OSError, LaunchError) as error:
            return _complain(str(error), 2)
        except (WorkerStartError, HostError) as error:
            return _complain(str(error), 1)
    for line in said:
        console.print(line, highlight=False, soft_wrap=True)
    return 0 if said else _report(console, request, store)


def _report(console: Console, request: Request, store: RecordStore) -> int:
    """Render the sweep, print its first table, and say where everything is."""
    from harness.render.files import render_sweep, render_terminal

    records, problems = store.load()
    try:
        rendered = render_sweep(store.results, request.label, records, problems)
    except OSError as error:
        return _complain(f"{store.results}: cannot write the tables ({error.strerror})", 2)
    if rendered.tables:
        console.print()
        render_terminal(rendered.tables[0], console)
        console.print()
    statuses = Counter(
        records[case.id].status if case.id in records else "missing" for case in request.cases
    )
    counted = ", ".join(f"{number} {status}" for status, number in statuses.items())
    console.print(f"{fmt.counted(len(request.cases), 'case')}: {counted}", highlight=False)
    places = {"report": rendered.report, "tables": rendered.folder / "tables"}
    places |= {"figures": rendered.folder / "figures", "records": store.folder}
    for name, place in places.items():
        if place.exists():
            console.print(f"{name:>8}  {place}", highlight=False, soft_wrap=True)
    broken = sum(statuses[status] for status in ("failed", "timeout", "wrong", "missing"))
    if broken:
        total = fmt.counted(len(request.cases), "case")
        print(
            f"attnbench: {broken} of {total} failed; the report says why, retry=true measures "
            "them again",
            file=sys.stderr,
        )
    return 1 if broken else 0


def _opening(request: Request, plan: Plan, predicted_s: float) -> str:
    scale = f", scale {request.scale}" if len(request.sweep.scales) > 1 else ""
    known = f", {len(plan.done)} of them recorded already" if plan.done else ""
    cases = fmt.counted(len(request.cases), "case")
    rounds = request.options.interleave
    turns = f", each in {rounds} rounds" if rounds > 1 else ""
    opening = f"{request.sweep.title} ({request.label}{scale}): {cases}{turns}{known}"
    if predicted_s <= LONG_S:
        return opening
    return (
        f"{opening}. Predicted time {_minutes(predicted_s)}; Ctrl-C stops, plan=true lists the "
        "cases and runs nothing, --help says what else there is"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def _print_plan(console: Console, request: Request, plan: Plan) -> None:
    """The list of ``plan=true``."""
    device_name = _device_name(request)

    def seconds(case: Case) -> float:
        return predicted_seconds(case, device_name, request.options.interleave)

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("case", overflow="fold")
    for header in ("memory (GiB)", "time (s)"):
        table.add_column(header, justify="right")
    table.add_column("state")
    states = {record.case_id: record.status for record in plan.done}

    def memory_gib(case: Case) -> str:
        return f"{sum(case.task.predicted_memory(case).values()) / 2**30:.3g}"

    for case in request.cases:
        state = states.get(case.id, "to measure")
        table.add_row(case.title, memory_gib(case), f"{seconds(case):.3g}", state)
    console.print(table)
    total = sum(map(seconds, plan.todo))
    console.print(
        f"{len(plan.todo)} of {fmt.counted(len(request.cases), 'case')} to measure on "
        f"{request.cases[0].device}, predicted time {_minutes(total)}; memory and time are "
        "predictions from formulas",
        highlight=False,
    )


def _device_name(request: Request) -> str:
    if all(case.device == "cpu" for case in request.cases):
        return ""
    from harness.run.local import probe_cuda

    names = probe_cuda()["names"]
    return str(names[0]) if names else ""


def _complain(message: str, code: int) -> int:
    print(f"attnbench: {' '.join(message.split())}", file=sys.stderr)
    return code
