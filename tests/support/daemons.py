"""A process that detaches itself as daemons do."""

from __future__ import annotations

import os
import time


def detach() -> int:
    """Fork, lead a session, fork again, with the first parent gone; the daemon's process id.

    It has all that this process had open, and sleeps until somebody ends it.
    """
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if pid := os.fork():
            os.write(write_fd, str(pid).encode())
            os._exit(0)
        time.sleep(1000)
    return int(os.read(read_fd, 20))
