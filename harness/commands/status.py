"""``attnbench-status`` and ``attnbench-cancel``: shows and stops the cases of a results folder."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.cases import format as fmt
from harness.printing import say, warn
from harness.run.nodes.hosts import CLOCK_TOLERANCE_S, clocks_differ
from harness.run.processes import can_be_seen, is_of_this_boot, stop
from harness.run.run_files import RunManifest, TaskState, read_bytes
from harness.run.run_folder import RunFolder, attempts, read_runs
from harness.run.slurm import commands as slurm
from harness.run.slurm.answers import Answers, ask_slurm, note_cancelled
from harness.run.slurm.jobs import arrays_of, identify, in_words
from harness.store.heads import RecordHead, read_heads
from harness.store.record import RecordStore, in_short
from harness.store.sweep_plan import command_into, planned_labels, read_plan

SHOWN = ("running", "preempted", "failed", "wrong", "timeout", "cancelled", "missing")
"""Statuses whose cases are listed one by one however many cases there are."""

ORDER = (*SHOWN, "pending", "unsupported", "oom", "ok")

LIST_ALL_UP_TO = 40

UNDER_WAY = frozenset({"running", "preempted", "pending"})


@dataclass(kw_only=True, slots=True)
class CaseStatus:
    """One case and its present state."""

    case_id: str
    status: str
    """A record's status, or pending, running, preempted, cancelled, failed or missing."""
    detail: str = ""


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
    heads, problems = read_heads(store)
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
            share = _ShareStatus(run, index, folder, answers)
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


class _ShareStatus:
    """One share of a run: its task's state, its job, and the state of its cases."""

    def __init__(
        self,
        run: RunManifest,
        index: int,
        folder: RunFolder,
        answers: Answers,
    ) -> None:
        self._run = run
        self._index = index
        self._folder = folder
        self._state: TaskState | None = None
        self._warning: str | None = None
        try:
            self._state = folder.read_state(index)
        except (OSError, ValueError) as error:
            self._warning = str(error)
        self._name = run.jobs[index] if run.is_submitted else None
        self._job = answers.queue.get(self._name or "")
        self._ended = answers.ended.get(self._name or "")
        self._unanswered = run.is_submitted and bool(answers.problem)
        if run.is_submitted:
            self.is_active = self._job is not None and self._job.is_active
            self.is_running = (
                self.is_active and self._job is not None and (self._job.state == "RUNNING")
            )
        else:
            self.is_active = self.is_running = folder.is_running(run)

    @property
    def _command(self) -> str:
        return command_into(self._run.command, self._folder.results)

    def describe(self, case_id: str, now_s: float) -> CaseStatus:
        """The state of a case of the share that has no record yet."""
        state = self._state
        its_turn = state is not None and state.case_id == case_id
        where = f"job {self._name}" if self._name else f"process {self._run.pid}"
        if self.is_running and its_turn and state is not None and state.event == "running":
            nodes = self._job.nodes if self._job else state.node
            since = _duration(self._lasts_s(state, now_s))
            return CaseStatus(
                case_id=case_id, status="running", detail=f"{where} on {nodes}, for {since}"
            )
        if self._unanswered and self._name and (state is None or state.error is None):
            known = (
                "not started" if state is None else f"{state.event} on {state.node} when last seen"
            )
            return CaseStatus(case_id=case_id, status="unknown", detail=f"{where} {known}")
        ending = (self._ended or self._job or slurm.Job(state="")).state
        if ending == "CANCELLED":
            return CaseStatus(case_id=case_id, status="cancelled", detail=where)
        if self.is_active:
            if its_turn and self._job is not None and self._job.is_ending:
                return CaseStatus(case_id=case_id, status="running", detail=f"{where} is ending")
            if its_turn and not self.is_running:
                return CaseStatus(
                    case_id=case_id, status="preempted", detail=f"{where} waits to start again"
                )
            reason = self._job.reason if self._job and not self.is_running else ""
            waits = f" waits: {reason}" if reason not in ("", "None") else ""
            return CaseStatus(case_id=case_id, status="pending", detail=f"{where}{waits}")
        if self._run.is_submitted and self._name is None:
            return CaseStatus(
                case_id=case_id,
                status="missing",
                detail=f"its submission ended before Slurm had it; run {self._command}",
            )
        if self._name is None:
            return CaseStatus(
                case_id=case_id, status="missing", detail=f"{where} ended; run {self._command}"
            )
        reason = (state.error if state else self._why_it_never_began()) or f"run {self._command}"
        how = f" ended as {ending}" if ending else " ended"
        return CaseStatus(
            case_id=case_id,
            status="failed" if state is None or state.error else "missing",
            detail=f"{where}{how}: {reason}",
        )

    def _lasts_s(self, state: TaskState, now_s: float) -> float:
        """How long the running case has been measured, whatever was done to the clock."""
        process = self._run.process
        began_s = state.since_monotonic_s
        if process is not None and began_s is not None and is_of_this_boot(process):
            return time.monotonic() - began_s
        return now_s - state.since_s

    def warnings(self) -> Iterator[str]:
        if self._warning:
            yield self._warning
        state = self._state
        if state is None or not self._name:
            return
        apart_s = state.clock_offset_s - self._run.clock_offset_s
        if abs(apart_s) > CLOCK_TOLERANCE_S:
            yield clocks_differ(state.node, apart_s)

    def _why_it_never_began(self) -> str:
        """The last line of the job's log, or a guess if it has none."""
        logs = sorted(self._folder.jobs.glob(f"{self._name}_*_log.err"))
        lines = [line for path in logs for line in _last_lines(path)]
        if not lines:
            nodes = (self._ended or self._job or slurm.Job(state="")).nodes or "the nodes"
            unless = "" if self._ended or self._job else ", and Slurm has no account of it"
            return (
                f"it wrote no log{unless}: is results={self._folder.results} shared with {nodes}? "
                "use a folder that all nodes have"
            )
        return lines[-1]


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


def _last_lines(path: Path) -> list[str]:
    try:
        text = read_bytes(path).decode(errors="replace")
    except (OSError, ValueError):
        return []
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [re.sub(r"^(slurmstepd|srun): (error: )?", "", line) for line in lines[-1:]]


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def show(status: Status, *, everything: bool) -> None:
    """Print counts, then one line per case: all cases if they are few, else those with problems."""
    counts = Counter(case.status for case in status.cases)
    words = [f"{counts[name]:,} {name}" for name in reversed(ORDER) if counts[name]]
    words += [f"{number:,} {name}" for name, number in counts.items() if name not in ORDER]
    left = "" if status.time_left_s is None else f"; about {_duration(status.time_left_s)} left"
    say(f"{fmt.counted(len(status.cases), 'case')}: {', '.join(words) or 'none planned'}{left}")
    everything = everything or len(status.cases) <= LIST_ALL_UP_TO
    listed = [case for case in status.cases if everything or case.status in SHOWN]
    width = max((len(case.status) for case in listed), default=0)
    for case in listed:
        say(f"{case.status:<{width}}  {case.case_id}  {case.detail}".rstrip())


def main(arguments: list[str] | None = None) -> int:
    """``attnbench-status``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="attnbench-status",
        description="What has become of the cases of a results folder, run locally or on Slurm: "
        "done, running on which job and node, waiting, failed and why, and the time left.",
    )
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a results folder")
    parser.add_argument("--all", action="store_true", help="list every case, however many")
    parser.add_argument("--json", action="store_true", help="for other programs")
    options = parser.parse_args(arguments)
    try:
        _require_folder(options.results)
        status = look(options.results)
    except ValueError as error:
        warn(error, command="attnbench-status")
        return 2
    if options.json:
        print(json.dumps(asdict(status), indent=1))
        return 0
    show(status, everything=options.all)
    for warning in status.warnings:
        warn(warning, command="attnbench-status")
    return 0


def cancel_main(arguments: list[str] | None = None) -> int:
    """``attnbench-cancel``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="attnbench-cancel",
        description="Stop what is queued or running for a results folder: Slurm jobs, and local "
        "runs on this host. What is recorded stays; the same command goes on with the rest.",
    )
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a results folder")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="such as 123 or 123_4; all if none")
    options = parser.parse_args(arguments)
    try:
        _require_folder(options.results)
        runs, lines = read_runs(options.results)
        if not options.jobs:
            lines += stop_local(runs)
    except ValueError as error:
        warn(error, command="attnbench-cancel")
        return 2
    problem = ""
    try:
        lines += cancel_jobs(options.results, runs, options.jobs)
    except slurm.SlurmError as error:
        problem = f"{error}; {_not_asked(runs)}"
    except ValueError as error:
        warn(error, command="attnbench-cancel")
        return 2
    if not lines and not problem:
        lines = ["nothing is queued or running"]
    for line in lines:
        say(line)
    if problem:
        warn(problem, command="attnbench-cancel")
    return 1 if problem else 0


def stop_local(runs: list[tuple[RunFolder, RunManifest]]) -> list[str]:
    """Stop the local runs among these that live; returns a line for each."""
    return [
        _stop(folder, run)
        for folder, run in runs
        if not run.is_submitted and folder.is_running(run)
    ]


def cancel_jobs(
    results: Path, runs: list[tuple[RunFolder, RunManifest]], only: list[str]
) -> list[str]:
    """Cancel active jobs of the folder; returns a line for each.

    Raises SlurmError, and ValueError if one of ``only`` is not among them.
    """
    identify(runs)
    jobs = {job for _, run in runs if run.is_submitted for job in run.jobs if job}
    queue = slurm.queued(job.split("_")[0] for job in jobs)
    active = {job for job in jobs if job in queue and queue[job].is_active}
    for name in only:
        if not any(name in (job, job.split("_")[0]) for job in active):
            known = ", ".join(sorted({job.split("_")[0] for job in active})) or "none"
            raise ValueError(f"JOB={name}: not queued or running for {results}; those are {known}")
    chosen = {job for job in active if not only or job in only or job.split("_")[0] in only}
    slurm.cancel(sorted(chosen))
    note_cancelled(runs, chosen)
    arrays = Counter(job.split("_")[0] for job in chosen)
    return [
        f"cancelled job {array} ({fmt.counted(number, 'task')})"
        for array, number in sorted(arrays.items())
    ]


def _not_asked(runs: list[tuple[RunFolder, RunManifest]]) -> str:
    """What may go on where Slurm does not cancel it, in one line."""
    submitted = [run for _, run in runs if run.is_submitted]
    arrays = arrays_of(submitted)
    unknown = any(None in run.jobs for run in submitted)
    words = [in_words(arrays)] if arrays else []
    words += ["jobs whose numbers are not known here"] if unknown else []
    return f"not cancelled, should they be queued or running: {' and '.join(words)}"


def _stop(folder: RunFolder, run: RunManifest) -> str:
    """Stop a local run; returns the line that says so, or why not."""
    if not can_be_seen(run.host, run.process):
        return f"process {run.pid} runs on {run.host}: stop it there"
    refused = stop(run.pid, run.process, folder.lock)
    if refused is None:
        return f"stopped process {run.pid}"
    return f"process {run.pid} of {folder.path} {refused}: not stopped"


def _require_folder(results: Path) -> None:
    if not results.is_dir():
        raise ValueError(f"RESULTS={results}: no such folder")
    if not any((results / name).is_dir() for name in ("sweeps", "runs", "records")):
        raise ValueError(
            f"RESULTS={results}: not a results folder (without sweeps, runs or records)"
        )


if __name__ == "__main__":
    sys.exit(main())
