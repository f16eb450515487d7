"""Which jobs have the cases of a run, and the commands that follow and cancel them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.run.run_folder import RunFolder, RunManifest
from harness.run.slurm import commands as slurm

PREFIX = "attnbench-"


def job_name(run_id: str, first: int) -> str:
    """The name of the job array whose first task has the share ``first`` of a run.

    By it the job is found whose id has not come into the run's file.
    """
    return f"{PREFIX}{run_id}-{first}"


def arrays_of(runs: Iterable[RunManifest]) -> set[str]:
    """The ids of the arrays, or of jobs that are none, that have the runs' shares."""
    return {job.split("_")[0] for run in runs for job in run.jobs if job is not None}


def identify(runs: Sequence[tuple[RunFolder, RunManifest]]) -> list[tuple[RunFolder, RunManifest]]:
    """Fill in the ids of jobs that were submitted by a command that was killed meanwhile.

    Returns the runs that had such jobs; their files stay as they are. Slurm is asked only about
    runs with shares that have no job. Raises SlurmError.
    """
    unknown = [item for item in runs if item[1].is_submitted and None in item[1].jobs]
    if not unknown:
        return []
    found = slurm.named(PREFIX)
    changed = []
    for folder, run in unknown:
        before = list(run.jobs)
        for first in range(len(run.jobs)):
            for job, index in found.get(job_name(run.id, first), ()):
                if first + index < len(run.jobs) and run.jobs[first + index] is None:
                    run.jobs[first + index] = job
        if run.jobs != before:
            changed.append((folder, run))
    return changed


def in_words(jobs: Iterable[str]) -> str:
    """``job 701``, or ``jobs 701 and 705_2``: arrays by their number, and single tasks."""
    names = sorted(dict.fromkeys(jobs))
    joined = " and ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)
    return f"{'job' if len(names) == 1 else 'jobs'} {joined}"


def follow_command(results: Path) -> str:
    return f"attnbench-status {shlex.quote(str(results))}"


def cancel_command(results: Path, jobs: Iterable[str] = ()) -> str:
    return " ".join(["attnbench-cancel", shlex.quote(str(results)), *sorted(set(jobs))])
