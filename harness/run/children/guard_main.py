"""The guard of a run: outlives the process that started it, and ends what that has left behind.

It runs this file alone, with the standard library, waits for its standard input to end and takes
no processor time until then. It ends every process that carries the run's mark in its environment:
workers, and what cases have started, in whatever session.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

MARK = "ATTNBENCH_PARENT"
"""The environment variable of workers that holds their parent's process id, the mark of its run,
and their number in it. All that a worker starts inherits it."""

PATIENCE_S = 20.0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])


def end_marked(mark: str) -> None:
    """Kill marked processes until there are none; one that has started more is met again."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and (left := marked(mark)):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def marked(mark: str) -> set[int]:
    """The living processes whose mark is ``mark``, or begins so if it ends in a hyphen."""
    wanted = f"{MARK}={mark}".encode()
    if not mark.endswith("-"):
        wanted += b"\0"
    found = set()
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal() and int(name) != os.getpid():
            # Of other users' processes, and of those that have just ended, nothing can be read.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if b"\0" + wanted in b"\0" + file.read() + b"\0":
                    found.add(int(name))
    return found


if __name__ == "__main__":
    main()
