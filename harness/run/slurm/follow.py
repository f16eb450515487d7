"""``wait=true``: follows submitted cases by the records that appear."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from harness.cases.case import Case
from harness.printing import warn
from harness.run.launcher import PendingCases
from harness.run.run_folder import RunFolder, RunManifest, runs_of
from harness.run.slurm import commands as slurm
from harness.run.slurm.jobs import arrays_of, cancel_command, follow_command, in_words
from harness.run.slurm.shares import counted
from harness.store.record import file_case, is_final

GRACE_S = 30.0
"""How long records of a job that has left the queue may take to appear in the file system."""

UNANSWERED_S = 1800.0
"""How long Slurm may leave every question unanswered before following ends."""

LONGEST_PAUSE_S = 60.0


def follow(pending: PendingCases, poll_s: float) -> None:
    """Report each case to the progress as it starts and ends, until none is left.

    Raises SlurmError if Slurm has not answered for :data:`UNANSWERED_S`, and KeyboardInterrupt
    that names the jobs which go on.
    """
    waiting = {case.id: case for case in pending.cases}
    try:
        _follow(pending, poll_s, waiting)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_goes_on(pending, set(waiting), "follows no longer")) from None
    except slurm.SlurmError as error:
        words = f"follows no longer, since Slurm has not answered for {UNANSWERED_S / 60:.0f} min"
        raise slurm.SlurmError(f"{_what_goes_on(pending, set(waiting), words)} ({error})") from None


def _follow(pending: PendingCases, poll_s: float, waiting: dict[str, Case]) -> None:
    """Follow the cases in ``waiting`` and remove those that have ended."""
    store, options = pending.store, pending.options
    queue = _Queue(poll_s)
    seen: set[str] = set()
    at_first = True
    alone_since: float | None = None
    while waiting:
        for name in sorted(set(store.names()) - seen):
            seen.add(name)
            found = file_case(name)
            if found is None or found[0] not in waiting:
                continue
            case_id = found[0]
            record = store.find(case_id)
            to_repeat = record is not None and (
                options.remeasure != "none" or not is_final(record, retry=options.retry)
            )
            if record is None or (at_first and to_repeat):
                # The one that is to be measured again.
                continue
            pending.progress.started(waiting.pop(case_id))
            pending.progress.finished(record, measured_now=True)
        at_first = False
        if not waiting:
            return
        runs = _runs_with(pending, set(waiting))
        jobs = queue.ask(arrays_of(run for _, run in runs))
        if jobs is None or _show_running(pending, set(waiting), runs, jobs):
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > min(GRACE_S, 3 * poll_s):
            return
        time.sleep(poll_s)


class _Queue:
    """squeue, which may fail for a while; says so once each time."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = self._pause_s = poll_s
        self._silent_since_s: float | None = None
        self._next_s = 0.0
        self._held: set[str] = set()

    def ask(self, arrays: Iterable[str]) -> dict[str, slurm.Job] | None:
        """The jobs of the arrays; None if Slurm does not say. SlurmError after a long silence."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        try:
            jobs = slurm.queued(arrays, patient=False)
        except slurm.SlurmError as error:
            if self._silent_since_s is None:
                self._silent_since_s = now_s
                warn(f"{error}; records are followed on, and squeue is asked again")
            if time.monotonic() - self._silent_since_s > UNANSWERED_S:
                raise
            self._pause_s = min(2 * self._pause_s, max(LONGEST_PAUSE_S, self._poll_s))
            self._next_s = time.monotonic() + self._pause_s
            return None
        if self._silent_since_s is not None:
            warn("squeue answers again")
        self._silent_since_s, self._pause_s = None, self._poll_s
        held = {name for name, job in jobs.items() if job.is_held}
        if new := sorted(held - self._held):
            warn(f"{in_words(new)} held ({jobs[new[0]].reason}): scontrol release {','.join(new)}")
        self._held = held
        return jobs


def _runs_with(pending: PendingCases, waiting: set[str]) -> list[tuple[RunFolder, RunManifest]]:
    """The submitted runs that have one of the cases."""
    return [
        (folder, run)
        for folder, run in runs_of(pending.options.results)
        if run.is_submitted and any(waiting.intersection(ids) for ids in run.case_ids)
    ]


def _what_goes_on(pending: PendingCases, waiting: set[str], words: str) -> str:
    """One line: the jobs that have the cases, and the commands that follow and cancel them."""
    results = pending.options.results
    jobs = {
        job
        for _, run in _runs_with(pending, waiting)
        for job, case_ids in zip(run.jobs, run.case_ids, strict=False)
        if job is not None and waiting.intersection(case_ids)
    }
    cases = counted(len(waiting), "case")
    if not jobs:
        return f"{words}; no job has the {cases} left"
    arrays = {job.split("_")[0] for job in jobs}
    return (
        f"{words}; {in_words(arrays)} ({counted(len(jobs), 'task')}, {cases}) not stopped: "
        f"{follow_command(results)} shows what becomes of them, "
        f"{cancel_command(results, arrays)} stops them"
    )


def _show_running(
    pending: PendingCases,
    waiting: set[str],
    runs: list[tuple[RunFolder, RunManifest]],
    jobs: dict[str, slurm.Job],
) -> bool:
    """Show one running case as progress; False if no job in the queue has any of them."""
    by_id = {case.id: case for case in pending.cases if case.id in waiting}
    alive = False
    shown = False
    for folder, run in runs:
        for index, (job, case_ids) in enumerate(zip(run.jobs, run.case_ids, strict=False)):
            if job not in jobs or not jobs[job].is_active or not waiting.intersection(case_ids):
                continue
            alive = True
            if shown or jobs[job].state != "RUNNING":
                continue
            state = None
            # A task is shown as soon as its file can be read.
            with contextlib.suppress(OSError, ValueError):
                state = folder.read_state(index)
            if state is not None and state.case_id in by_id:
                shown = True
                pending.progress.started(by_id[state.case_id])
                pending.progress.stage(f"job {job} on {jobs[job].nodes}")
    if not shown:
        pending.progress.stage("waiting for the queue")
    return alive
