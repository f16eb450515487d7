"""``wait=true``: follows submitted cases by the records that appear."""

from __future__ import annotations

import time

from harness.run.launcher import PendingCases
from harness.run.run_folder import runs_of
from harness.run.slurm import commands as slurm
from harness.store.record import file_case, is_final

GRACE_S = 30.0
"""How long records of a job that has left the queue may take to appear in the file system."""


def follow(pending: PendingCases, poll_s: float) -> None:
    """Report each case to the progress as it starts and ends, until none is left."""
    store, options = pending.store, pending.options
    waiting = {case.id: case for case in pending.cases}
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
        if _show_running(pending, set(waiting)):
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > min(GRACE_S, 3 * poll_s):
            return
        time.sleep(poll_s)


def _show_running(pending: PendingCases, waiting: set[str]) -> bool:
    """Show one running case as progress; False if no job in the queue has any of them."""
    by_id = {case.id: case for case in pending.cases if case.id in waiting}
    runs = [
        (folder, run)
        for folder, run in runs_of(pending.options.results)
        if run.is_submitted and any(waiting.intersection(ids) for ids in run.case_ids)
    ]
    jobs = slurm.queued(job.split("_")[0] for _, run in runs for job in run.jobs if job)
    alive = False
    shown = False
    for folder, run in runs:
        for index, (job, case_ids) in enumerate(zip(run.jobs, run.case_ids, strict=True)):
            if job not in jobs or not jobs[job].is_active or not waiting.intersection(case_ids):
                continue
            alive = True
            if shown or jobs[job].state != "RUNNING":
                continue
            state = folder.read_state(index)
            if state is not None and state.case_id in by_id:
                shown = True
                pending.progress.started(by_id[state.case_id])
                pending.progress.stage(f"job {job} on {jobs[job].nodes}")
    if not shown:
        pending.progress.stage("waiting for the queue")
    return alive
