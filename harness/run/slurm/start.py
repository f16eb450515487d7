"""The program of every rank of a task: ``python -m harness.run.slurm.start FOLDER NAME``.

It runs submitit's, which loads the task from a file that bears the job's id. Slurm's warning
(SIGUSR2) is held from the first line on, until the task has its handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path


def task_file(name: str, index: int) -> str:
    """The file of an array's task, by the job's name, which is known before it has an id."""
    return f"{name}_{index}.pkl"


def main() -> None:
    """Name the task's file as submitit does, and run it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    # Late, since it takes up to seconds, in which the signal may come.
    import submitit
    from submitit.core.submission import process_job

    folder, name = sys.argv[1:]
    os.environ["SUBMITIT_FOLDER"] = folder
    path = Path(submitit.JobEnvironment().paths.submitted_pickle)
    # Another rank may be first; and a task that starts again left a file of its own.
    with contextlib.suppress(FileExistsError):
        path.symlink_to(task_file(name, int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))))
    process_job(folder)


if __name__ == "__main__":
    main()
