"""A session: carry out one request, from the records that exist to the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from harness.cases import format as fmt
from harness.cases.case import Case
from harness.cases.recorded import load
from harness.escapes import printable
from harness.printing import say, warn
from harness.request.compose import Request
from harness.request.plan import (
    IN_TURNS,
    PlannedCases,
    further_rounds_s,
    plan_cases,
    predicted_seconds,
    sweep_plan,
)
from harness.request.plan_listing import minutes, print_plan
from harness.request.staleness import in_a_line
from harness.run import local
from harness.run import progress as progresses
from harness.run.launcher import LaunchError, PendingCases
from harness.run.nodes.errors import HostError
from harness.run.warm_workers import predicted_starts_s
from harness.run.workers import worker_group
from harness.store.attempts import Records
from harness.store.record import RecordStore, in_short
from harness.store.rounds import RoundStore
from harness.store.sweep_plan import write_plan
from harness.terminal import PrintableConsole

LONG_S = 30.0
"""A command that is predicted to take longer says what can be done about it."""

MOST_FINDINGS = 3
"""Sentences at the end of a command; its report and the write-up have all."""


def run_request(request: Request) -> int:
    """Print the plan, or measure what is left of it and report; returns the exit code."""
    console = PrintableConsole(soft_wrap=False)
    store = RecordStore(request.options.results)
    if not request.plan:
        try:
            store.create()
            for line in store.take_up_rescued():
                warn(line)
            RoundStore(store).tidy()
            write_plan(store.results, sweep_plan(request))
        except OSError as error:
            return _complain(f"results={store.results}: cannot be written ({error.strerror})", 2)
    elif (file := _file_on_the_way(store.results)) is not None:
        where = "is a file" if file == store.results else f"{file} is a file"
        return _complain(f"results={store.results}: {where}; must be a folder", 2)
    records, problems = load(store)
    for problem in in_short(problems):
        warn(f"{problem}; measured again")
    device_name = _device_name(request)
    plan = plan_cases(request, records, device_name)
    num_peers = list(plan.why_again.values()).count(IN_TURNS)
    if request.options.remeasure == "none" and (line := in_a_line(plan.staleness, num_peers)):
        warn(line)

    def predict(case: Case) -> float:
        return predicted_seconds(case, device_name, request.options.interleave)

    if request.plan:
        print_plan(console, request, plan, predict)
        return 0
    return _measure(console, request, plan, store, predict)


def _file_on_the_way(folder: Path) -> Path | None:
    """What is no folder but would have to be, for a folder of this path to be written."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return None if existing.is_dir() else existing


def _measure(
    console: Console,
    request: Request,
    plan: PlannedCases,
    store: RecordStore,
    predict: Callable[[Case], float],
) -> int:
    """Launch the cases that are left, then report."""
    predicted_s = sum(map(predict, plan.todo)) + predicted_starts_s(plan.todo, request.options)
    _print(console, _opening(request, plan, predicted_s))
    rounds = request.options.interleave
    with progresses.TerminalProgress(console, plan.todo, predict, rounds) as progress:
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
        except (worker_group.WorkerStartError, HostError) as error:
            return _complain(str(error), 1)
    for line in said:
        console.print(line, highlight=False, soft_wrap=True)
    if said:
        return 0
    code = _report(console, request, store)
    if request.options.until_decided:
        _say_if_busy(plan, store)
    return code


def _report(console: Console, request: Request, store: RecordStore) -> int:
    """Render the sweep, print its first table, and say where everything is."""
    # A plan renders nothing, and pandas and matplotlib take a second to load.
    from harness.render.files import render_sweep, render_terminal

    records, problems = load(store)
    try:
        rendered = render_sweep(store.results, request.label, records, problems)
    except OSError as error:
        return _complain(f"{store.results}: cannot write the tables ({error.strerror})", 2)
    except ValueError as error:
        return _complain(str(error), 2)
    for problem in rendered.problems:
        warn(problem)
    if rendered.tables:
        console.print()
        render_terminal(rendered.tables[0], console)
        console.print()
    for name, sentence in islice(rendered.findings.items(), MOST_FINDINGS):
        _print(console, f"{name}: {sentence}")
    if rendered.findings:
        console.print()
    newest = {case.id: records.newest(case.id) for case in request.cases}
    statuses = Counter(record.status if record else "missing" for record in newest.values())
    counted = ", ".join(f"{number} {status}" for status, number in statuses.items())
    console.print(f"{fmt.counted(len(request.cases), 'case')}: {counted}", highlight=False)
    if line := _kept_line([case.id for case in request.cases], records):
        console.print(line, highlight=False)
    places = {"report": rendered.report, "tables": rendered.folder / "tables"}
    places |= {"figures": rendered.folder / "figures", "records": store.folder}
    for name, place in places.items():
        if place.exists():
            say(f"{name:>8}  {place}")
    broken = sum(statuses[status] for status in ("failed", "timeout", "wrong", "missing"))
    if broken:
        total = fmt.counted(len(request.cases), "case")
        warn(f"{broken} of {total} failed; the report says why, retry=true measures them again")
    return 1 if broken else 0


def _print(console: Console, words: str) -> None:
    """A paragraph, broken into lines for a terminal alone."""
    words = escape(printable(words))
    console.print(words, highlight=False, soft_wrap=not console.is_terminal)


def _kept_line(case_ids: Sequence[str], records: Records) -> str:
    """How many newest attempts do not count, and how they ended; empty if all do."""
    kept = Counter(
        records.later[case_id].status for case_id in case_ids if case_id in records.later
    )
    if not kept:
        return ""
    words = ", ".join(f"{number} {status}" for status, number in kept.items())
    noun = "case keeps" if kept.total() == 1 else "cases keep"
    return f"{kept.total()} {noun} an earlier result: of the newest attempts {words}"


def _say_if_busy(plan: PlannedCases, store: RecordStore) -> None:
    """Say on stderr how many of the cases measured now were disturbed by other processes."""
    # Loads numpy, which a plan does not need.
    from harness.analysis.disturbance import was_busy

    records = [record for case in plan.todo if (record := store.find(case.id)) is not None]
    busy = sum(map(was_busy, records))
    if busy:
        warn(
            f"other processes kept this machine busy during {busy} of "
            f"{fmt.counted(len(records), 'case')}; their rows are marked"
        )


def _opening(request: Request, plan: PlannedCases, predicted_s: float) -> str:
    """What will be measured, how long that will take, and for a long run what can be done."""
    scale = f", scale {request.scale}" if len(request.sweep.scales) > 1 else ""
    cases = fmt.counted(len(request.cases), "case")
    opening = f"{request.sweep.title} ({request.label}{scale}): {cases}"
    if not plan.todo:
        return f"{opening}, recorded already; tables and figures are made again"
    rounds = request.options.interleave
    turns = f", each in {rounds} rounds" if rounds > 1 else ""
    at_most = ""
    if request.options.until_decided:
        turns += ", and more until decided"
        at_most = " at most"
        predicted_s += further_rounds_s(request.options, predicted_s)
    known = f", {len(plan.done)} of them recorded already" if plan.done else ""
    opening += f"{turns}{known}; predicted time{at_most} {_in_words(predicted_s)}"
    if predicted_s <= LONG_S:
        return opening
    return (
        f"{opening}. Ctrl-C stops, and the same command goes on; plan=true lists the cases and "
        "runs nothing; --help says what else there is"
    )


def _in_words(seconds: float) -> str:
    return minutes(seconds) if seconds >= 60 else f"{max(1, round(seconds))} s"


def _device_name(request: Request) -> str:
    if all(case.device == "cpu" for case in request.cases):
        return ""
    if request.machine is not None:
        return request.machine.name
    names = local.probe_cuda()["names"]
    return str(names[0]) if names else ""


def _complain(message: str, code: int) -> int:
    warn(" ".join(message.split()))
    return code
