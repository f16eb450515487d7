"""Submits a job array: one pickled task for each share, and a batch script written by submitit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import submitit
from submitit.helpers import DelayedSubmission

from harness.run.run_folder import RunFolder
from harness.run.slurm import commands as slurm
from harness.run.slurm.start import task_file
from harness.run.slurm.task import ShareTask

REQUEUES = 1_000_000
"""Effectively no limit on requeues: every start of a task finishes at least one case."""

HOLD = 'trap "" USR2; env --block-signal=USR2 true 2>/dev/null && exec env --block-signal=USR2 "$@"'
HOLD += '; exec "$@"'
"""The shell that starts a rank's Python. Slurm's warning would kill it before it has its handler:
the signal is blocked until then, and ignored where ``env`` cannot block one (coreutils < 8.31)."""


def submit_array(
    folder: RunFolder,
    tasks: Sequence[ShareTask],
    *,
    name: str,
    parameters: dict[str, Any],
    python: str | None,
) -> list[str]:
    """Submit the tasks under a name that no other job has; returns their job ids.

    The tasks' files are named after the job, not after its id, so that they are in place before
    it exists, and it can run although whoever submitted it has not lived to know its id.

    Args:
        parameters: submitit's, which writes the batch script.
        python: the interpreter on the nodes; None is this one.
    """
    for index, task in enumerate(tasks):
        delayed = DelayedSubmission(task)
        delayed.set_timeout(task.time_min, REQUEUES)
        delayed.dump(folder.jobs / task_file(name, index))
    executor = submitit.SlurmExecutor(folder.jobs, max_num_timeout=REQUEUES, python=python)
    executor.update_parameters(**parameters, job_name=name)
    if len(tasks) > 1:
        executor.parameters["map_count"] = len(tasks)
    shell = f"sh -c {shlex.quote(HOLD)} attnbench"
    module = f"harness.run.slurm.start {shlex.quote(str(folder.jobs))} {name}"
    text = executor._make_submission_file_text(f"{shell} {executor.python} -u -m {module}", name)
    script = folder.jobs / f"{name}.sh"
    script.write_text(text, encoding="utf-8")
    try:
        job = slurm.submit(script, name)
    except slurm.UnsureError:
        raise
    except slurm.SlurmError as error:
        reason = str(error).removeprefix("sbatch: ")
        raise slurm.SlurmError(
            f"launcher=slurm: sbatch refused: {reason}; set launcher.account, qos, constraint, "
            "time_min or sbatch as this cluster wants them"
        ) from error
    return [job] if len(tasks) == 1 else [f"{job}_{index}" for index in range(len(tasks))]
