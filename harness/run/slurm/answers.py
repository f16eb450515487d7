"""Slurm's answers about the runs of a results folder, for who shows their state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from harness.run.run_folder import RunFolder, RunManifest
from harness.run.slurm import commands as slurm
from harness.run.slurm.jobs import arrays_of, identify

CANCELLED = "cancelled"
"""The file in a run's folder that lists the jobs cancelled by attnbench-cancel, one a line.

A cluster without accounts forgets within minutes how a job ended.
"""


@dataclass(kw_only=True, slots=True)
class Answers:
    """The jobs that squeue has, and how those ended that left cases unmeasured."""

    queue: dict[str, slurm.Job] = field(default_factory=dict)
    ended: dict[str, slurm.Job] = field(default_factory=dict)
    problem: str = ""
    """Why Slurm could not be asked, in one line."""


def ask_slurm(
    runs: Sequence[tuple[RunFolder, RunManifest]], is_recorded: Callable[[str, RunManifest], bool]
) -> Answers:
    """Ask about the runs that have cases without a record, and about no others.

    Args:
        is_recorded: whether a run, or a later one, has written the record of a case.
    """
    open_runs = [
        (folder, run)
        for folder, run in runs
        if run.is_submitted
        and any(not is_recorded(case_id, run) for case_ids in run.case_ids for case_id in case_ids)
    ]
    answers = Answers()
    if not open_runs:
        return answers
    try:
        identify(open_runs)
        answers.queue = slurm.queued(arrays_of(run for _, run in open_runs))
    except slurm.SlurmError as error:
        answers.problem = str(error)
    over: set[str] = set()
    for folder, run in open_runs:
        cancelled = _cancelled(folder)
        for job, case_ids in zip(run.jobs, run.case_ids, strict=False):
            in_queue = answers.queue.get(job or "")
            goes_on = in_queue is not None and in_queue.is_active and not in_queue.is_ending
            if job is None or goes_on or all(is_recorded(case_id, run) for case_id in case_ids):
                continue
            if job in cancelled:
                answers.ended[job] = slurm.Job(state="CANCELLED")
            else:
                over.add(job)
    if not answers.problem:
        accounts = slurm.accounted(job.split("_")[0] for job in over)
        ended = {job: accounts[job] for job in over & accounts.keys()}
        answers.ended |= {job: account for job, account in ended.items() if not account.is_active}
    return answers


def note_cancelled(runs: Sequence[tuple[RunFolder, RunManifest]], jobs: Collection[str]) -> None:
    """Keep which jobs were cancelled, so that nobody takes their end for a failure."""
    for folder, run in runs:
        if ours := [job for job in run.jobs if job in jobs]:
            with (
                contextlib.suppress(OSError),
                open(folder.path / CANCELLED, "a", encoding="utf-8", opener=_regular) as file,
            ):
                file.write("".join(f"{job}\n" for job in ours))


def _regular(path: str, flags: int) -> int:
    """Open a file, but no link, and without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


def _cancelled(folder: RunFolder) -> set[str]:
    path = folder.path / CANCELLED
    with contextlib.suppress(OSError):
        if path.is_file():
            return set(path.read_text(encoding="utf-8", errors="replace").split())
    return set()
