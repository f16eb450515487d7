"""``attnbench-status``: shows what has become of the cases of a results folder."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.cases import format as fmt
from harness.cases.recorded import why_not
from harness.commands.results_folder import complain, require_folder, results_parser
from harness.commands.share_status import CaseStatus, ShareStatus, duration
from harness.printing import say, warn
from harness.run.run_files import RunManifest
from harness.run.run_folder import RunFolder, attempts, read_runs
from harness.run.slurm.answers import ask_slurm
from harness.store.heads import RecordHead, read_heads
from harness.store.record import RecordStore, in_short
from harness.store.sweep_plan import command_into, planned_labels, read_plan

COMMAND = "attnbench-status"

SHOWN = ("running", "preempted", "failed", "wrong", "timeout", "cancelled", "missing")
"""Statuses whose cases are listed one by one however many cases there are."""

ORDER = (*SHOWN, "pending", "unsupported", "oom", "ok")

LIST_ALL_UP_TO = 40

UNDER_WAY = frozenset({"running", "preempted", "pending"})


@dataclass(kw_only=True, slots=True)
class Status:
    """The state of a results folder."""

    cases: list[CaseStatus] = field(default_factory=list)
    time_left_s: float | None = None
    """Predicted for the cases under way; None if there are none."""
    warnings: list[str] = field(default_factory=list)


def look(results: Path, now_s: float | None = None) -> Status:
    """Combine plans, records, runs and the queue into the state of every case.

    Slurm is asked only about submitted runs with cases that have no record; where it cannot be
    asked, a warning says so and files alone decide.
    """
    now_s = time.time() if now_s is None else now_s
    store = RecordStore(results)
    heads, problems = read_heads(store, why_not)
    newest = attempts(store, heads)
    runs, set_aside = read_runs(results)
    status = Status(warnings=in_short(problems) + set_aside)
    found: dict[str, CaseStatus] = {}
    pace = _Pace()
    left_s = 0.0
    answers = ask_slurm(runs, lambda case_id, run: _is_recorded(case_id, run, heads, newest))
    if answers.problem:
        status.warnings.append(f"{answers.problem}; jobs are shown as their files say")
    for folder, run in runs:
        lefts = []
        for index in range(len(run.case_ids)):
            share = ShareStatus(run, index, folder, answers)
            predicted = dict(zip(run.case_ids[index], run.predicted_s[index], strict=True))
            left = [
                case_id for case_id in predicted if not _is_recorded(case_id, run, heads, newest)
            ]
            for case_id in predicted:
                if case_id in heads and case_id not in left:
                    pace.add(predicted[case_id], heads[case_id].wall_s)
            if not left:
                continue
            status.warnings += share.warnings()
            for case_id in left:
                so_far = share.describe(case_id, now_s)
                # The latest run decides a case's state, unless an earlier one still has it.
                if (
                    so_far.status in UNDER_WAY
                    or found.get(case_id) is None
                    or (found[case_id].status not in UNDER_WAY)
                ):
                    found[case_id] = so_far
            if share.is_active:
                lefts.append((share.is_running, sum(predicted[case_id] for case_id in left)))
        if lefts:
            at_once = max(1, sum(running for running, _ in lefts))
            longest = max(seconds for _, seconds in lefts)
            left_s = max(left_s, longest, sum(seconds for _, seconds in lefts) / at_once)
            status.time_left_s = left_s * pace.factor
    for case_id, command in _known(results, runs).items():
        case = found.get(case_id)
        head = heads.get(case_id)
        if head is not None and (case is None or case.status not in UNDER_WAY):
            case = CaseStatus(case_id=case_id, status=head.status, detail=_detail(head))
        if case is None:
            case = CaseStatus(
                case_id=case_id,
                status="missing",
                detail=f"no job has it; run {command}" if command else "no job has it",
            )
        status.cases.append(case)
    status.warnings = list(dict.fromkeys(status.warnings))
    return status


def _detail(head: RecordHead) -> str:
    kept = f"attempt {head.counts} counts" if head.counts else ""
    return "; ".join(filter(None, [head.message, kept]))


class _Pace:
    """The measured time of finished cases, relative to the predicted one."""

    def __init__(self) -> None:
        self._predicted_s = self._took_s = 0.0

    def add(self, predicted_s: float, took_s: float) -> None:
        self._predicted_s += predicted_s
        self._took_s += took_s

    @property
    def factor(self) -> float:
        return self._took_s / self._predicted_s if self._predicted_s > 0 else 1.0


def _is_recorded(
    case_id: str, run: RunManifest, heads: dict[str, RecordHead], newest: dict[str, int]
) -> bool:
    """Whether a case has a record that this run, or a later one, wrote."""
    head = heads.get(case_id)
    if head is None:
        return False
    if run.attempts_before is not None:
        return newest.get(case_id, 0) > run.attempts_before.get(case_id, 0)
    return head.written_s >= run.created_s - run.clock_offset_s - 1


def _known(results: Path, runs: list[tuple[RunFolder, RunManifest]]) -> dict[str, str]:
    """Every planned case, in the order of the plans, with the command that measures it."""
    known: dict[str, str] = {}
    for label in planned_labels(results):
        # attnbench-report says what is wrong with a plan.
        with contextlib.suppress(ValueError):
            plan = read_plan(results, label)
            command = command_into(plan.command, results)
            for case_id in plan.case_ids:
                known.setdefault(case_id, command)
    for _, run in runs:
        command = command_into(run.command, results)
        for case_id in (case_id for case_ids in run.case_ids for case_id in case_ids):
            known.setdefault(case_id, command)
    return known


def show(status: Status, *, everything: bool) -> None:
    """Print counts, then one line per case: all cases if they are few, else those with problems."""
    counts = Counter(case.status for case in status.cases)
    words = [f"{counts[name]:,} {name}" for name in reversed(ORDER) if counts[name]]
    words += [f"{number:,} {name}" for name, number in counts.items() if name not in ORDER]
    left = "" if status.time_left_s is None else f"; about {duration(status.time_left_s)} left"
    say(f"{fmt.counted(len(status.cases), 'case')}: {', '.join(words) or 'none planned'}{left}")
    everything = everything or len(status.cases) <= LIST_ALL_UP_TO
    listed = [case for case in status.cases if everything or case.status in SHOWN]
    width = max((len(case.status) for case in listed), default=0)
    for case in listed:
        say(f"{case.status:<{width}}  {case.case_id}  {case.detail}".rstrip())


def main(arguments: list[str] | None = None) -> int:
    """``attnbench-status``; returns the exit code."""
    parser = results_parser(
        COMMAND,
        "What has become of the cases of a results folder, run locally or on Slurm: "
        "done, running on which job and node, waiting, failed and why, and the time left.",
    )
    parser.add_argument("--all", action="store_true", help="list every case, however many")
    parser.add_argument("--json", action="store_true", help="for other programs")
    options = parser.parse_args(arguments)
    try:
        require_folder(options.results)
        status = look(options.results)
    except ValueError as error:
        return complain(error, COMMAND)
    if options.json:
        print(json.dumps(asdict(status), indent=1))
        return 0
    show(status, everything=options.all)
    for warning in status.warnings:
        warn(warning, command=COMMAND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
