"""The entry point of a worker's process: ties it to its parent's life, then imports torch.

The import takes seconds, and a parent that is killed meanwhile must not leave the worker behind.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

PARENT = "ATTNBENCH_PARENT"
"""The environment variable that holds the parent's process id."""

PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_parent(int(os.environ[PARENT]))
    # While modules are imported nearly nothing becomes garbage, and looking for it again and
    # again takes a fifth of the time; the worker collects from when it is ready.
    gc.disable()
    # Only now, after the process is tied to its parent: this imports torch.
    from harness.run.worker import main as work

    work()


def die_with_parent(parent: int) -> None:
    """End this process with its parent, however that ends (Linux: prctl(2), PR_SET_PDEATHSIG)."""
    # Slurm tells every process of a job to stop; the parent hears it too, and ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # One that ended before prctl was called sends no signal any more.
    if os.getppid() != parent:
        sys.exit("the process that started this worker has ended")


if __name__ == "__main__":
    main()
