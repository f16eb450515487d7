"""One share of a run: its task's state, its job, and the state of its cases without a record."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.run.nodes.hosts import CLOCK_TOLERANCE_S, clocks_differ
from harness.run.processes import is_of_this_boot
from harness.run.run_files import RunManifest, TaskState, read_bytes
from harness.run.run_folder import RunFolder
from harness.run.slurm import commands as slurm
from harness.run.slurm.answers import Answers
from harness.store.sweep_plan import command_into


@dataclass(kw_only=True, slots=True)
class CaseStatus:
    """One case and its present state."""

    case_id: str
    status: str
    """A record's status, or pending, running, preempted, cancelled, failed or missing."""
    detail: str = ""


class ShareStatus:
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
            since = duration(self._lasts_s(state, now_s))
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


def _last_lines(path: Path) -> list[str]:
    try:
        text = read_bytes(path).decode(errors="replace")
    except (OSError, ValueError):
        return []
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [re.sub(r"^(slurmstepd|srun): (error: )?", "", line) for line in lines[-1:]]


def duration(seconds: float) -> str:
    """Seconds in words, as minutes or hours."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
