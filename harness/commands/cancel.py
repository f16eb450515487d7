"""``attnbench-cancel``: stops what is queued or running for a results folder."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from harness.cases import format as fmt
from harness.commands.results_folder import complain, require_folder, results_parser
from harness.printing import say, warn
from harness.run.processes import can_be_seen, stop
from harness.run.run_files import RunManifest
from harness.run.run_folder import RunFolder, read_runs
from harness.run.slurm import commands as slurm
from harness.run.slurm.answers import note_cancelled
from harness.run.slurm.jobs import arrays_of, identify, in_words

COMMAND = "attnbench-cancel"


def main(arguments: list[str] | None = None) -> int:
    """``attnbench-cancel``; returns the exit code."""
    parser = results_parser(
        COMMAND,
        "Stop what is queued or running for a results folder: Slurm jobs, and local "
        "runs on this host. What is recorded stays; the same command goes on with the rest.",
    )
    parser.add_argument(
        "jobs", nargs="*", default=[], metavar="JOB", help="such as 123 or 123_4; all if none"
    )
    options = parser.parse_args(arguments)
    try:
        require_folder(options.results)
        runs, lines = read_runs(options.results)
        if not options.jobs:
            lines += stop_local(runs)
    except ValueError as error:
        return complain(error, COMMAND)
    problem = ""
    try:
        lines += cancel_jobs(options.results, runs, options.jobs)
    except slurm.SlurmError as error:
        problem = f"{error}; {_not_asked(runs)}"
    except ValueError as error:
        return complain(error, COMMAND)
    if not lines and not problem:
        lines = ["nothing is queued or running"]
    for line in lines:
        say(line)
    if problem:
        warn(problem, command=COMMAND)
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
    """The jobs that may go on because Slurm did not cancel them, in one line."""
    submitted = [run for _, run in runs if run.is_submitted]
    arrays = arrays_of(submitted)
    unknown = any(None in run.jobs for run in submitted)
    words = [in_words(arrays)] if arrays else []
    words += ["jobs whose numbers are not known here"] if unknown else []
    return f"{' and '.join(words)} may still be queued or running"


def _stop(folder: RunFolder, run: RunManifest) -> str:
    """Stop a local run; returns the line that says so, or why not."""
    if not can_be_seen(run.host, run.process):
        return f"process {run.pid} runs on {run.host}: stop it there"
    refused = stop(run.pid, run.process, folder.lock)
    if refused is None:
        return f"stopped process {run.pid}"
    return f"process {run.pid} of {folder.path} {refused}: not stopped"


if __name__ == "__main__":
    sys.exit(main())
