"""Signals to stop, held back while something is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


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
        for stopping in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
        if signal.getsignal(stopping) is not None
    }
    try:
        yield
    finally:
        for stopping, handler in before.items():
            signal.signal(stopping, handler)
        for number in held:
            signal.raise_signal(number)
