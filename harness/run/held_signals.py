"""Signals to stop: which they are, and how they are held back while something is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Ctrl-C, a polite end, the end of the terminal, and Slurm's warning before a time limit."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals to stop until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        # Handlers run in the main thread, and only it may set them.
        yield
        return
    held: list[int] = []
    # A signal mask is not enough: it holds for one thread, and another would get the signal.
    before = {
        stopping: signal.signal(stopping, lambda number, frame: held.append(number))
        for stopping in STOPPING
        if signal.getsignal(stopping) not in (None, signal.SIG_IGN)
    }
    try:
        yield
    finally:
        for stopping, handler in before.items():
            signal.signal(stopping, handler)
        for number in held:
            signal.raise_signal(number)
