"""The entry point of a worker's process: ties it to its parent's life, then imports torch.

The import takes seconds, and a parent that is killed meanwhile must not leave the worker behind.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys

from harness.run.children import family
from harness.run.children.guard_main import MARK
from harness.run.children.worker_side import Channel


def main() -> None:
    die_with_parent(int(os.environ[MARK].partition("-")[0]))
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--events-fd", type=int, required=True)
    known, further = parser.parse_known_args()
    channel = Channel(known.events_fd)
    # While modules are imported nearly nothing becomes garbage, and looking for it again and
    # again takes a fifth of the time; the worker collects from when it is ready.
    gc.disable()
    # Only now, after the process is tied to its parent: this imports torch.
    from harness.run.workers.worker import main as work

    work(channel, further)


def die_with_parent(parent: int) -> None:
    """End this process with its parent, however that ends (Linux: prctl(2), PR_SET_PDEATHSIG)."""
    # Slurm tells every process of a job to stop; the parent hears it too, and ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    family.set_process_option(family.PR_SET_PDEATHSIG, signal.SIGKILL)
    # What it has started stays below it, where its parent finds it.
    family.set_process_option(family.PR_SET_CHILD_SUBREAPER, 1)
    # One that ended before prctl was called sends no signal any more.
    if os.getppid() != parent:
        sys.exit("the process that started this worker has ended")


if __name__ == "__main__":
    main()
