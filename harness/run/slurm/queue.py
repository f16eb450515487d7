"""Cases that a results folder has in the queue: found there, and taken back from it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from harness.printing import warn
from harness.run.run_folder import RunFolder, RunManifest, runs_of
from harness.run.slurm import commands as slurm
from harness.run.slurm.jobs import arrays_of, cancel_command, identify, in_words


def active_cases(results: Path) -> set[str]:
    """Ids of the cases that queued or running jobs have.

    Under the planning lock: ids that a killed submission left out of a run's file go into it.
    """
    submitted = [(folder, run) for folder, run in runs_of(results) if run.is_submitted]
    for folder, run in identify(submitted):
        folder.write_run(run)
    runs = [run for _, run in submitted]
    arrays = arrays_of(runs)
    if not arrays:
        return set()
    jobs = slurm.queued(arrays)
    return {
        case_id
        for run in runs
        for job, case_ids in zip(run.jobs, run.case_ids, strict=True)
        if job in jobs and jobs[job].is_active
        for case_id in case_ids
    }


def take_back(folder: RunFolder, run: RunManifest, *, may_be_queued: bool) -> None:
    """Cancel what is submitted, so that no half of a sweep stays in the queue."""
    jobs = [job for job in run.jobs if job is not None]
    try:
        slurm.cancel(jobs)
    except slurm.SlurmError as error:
        with contextlib.suppress(OSError):
            folder.write_run(run)
        warn(
            f"{in_words(jobs)} may go on ({error}); {cancel_command(folder.results, jobs)} cancels"
        )
        return
    if not may_be_queued:
        folder.remove()
