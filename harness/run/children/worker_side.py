"""A worker's own end: its pipes, kept from whatever a case starts, and a clean start for each case.

The pipes move away from standard input and from numbers that a child inherits: a child that
outlives the worker would hold them open, and one that reads its input would take jobs away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import IO, Any

FIRST_FD = 64
"""Beyond the numbers that a program closes or replaces by chance."""


class Channel:
    """The jobs and the events of this process; made before anything else runs in it."""

    def __init__(self, events_fd: int) -> None:
        self._events_fd = _moved(events_fd)
        self._jobs_fd = _moved(0)
        self._point_at_nothing(0)
        os.register_at_fork(after_in_child=self._let_go)

    def _let_go(self) -> None:
        """In a child that was forked, without exec: it shall neither report nor take jobs."""
        self._point_at_nothing(self._events_fd)
        self._point_at_nothing(self._jobs_fd)

    @staticmethod
    def _point_at_nothing(fd: int) -> None:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, fd, inheritable=fd < FIRST_FD)
        if nothing != fd:
            os.close(nothing)

    def jobs(self) -> Iterator[dict[str, Any]]:
        """The jobs, until there are no more."""
        with os.fdopen(self._jobs_fd, "rb", closefd=False) as lines:
            for line in lines:
                yield json.loads(line)

    def send(self, **event: Any) -> None:
        """Send one event. Raises OSError if the pipe is gone."""
        left = memoryview(json.dumps(event).encode() + b"\n")
        while left:
            left = left[os.write(self._events_fd, left) :]


class CleanStart:
    """What a case can change of the process, and the next one finds as it was."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._log_fds = {fd: _copy(fd) for fd in (1, 2)}
        self._handlers = {number: signal.getsignal(number) for number in _settable_signals()}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def restore(self) -> None:
        """Put the folder, the outputs and the signal handlers back."""
        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        for fd, copy in self._log_fds.items():
            os.dup2(copy, fd)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            if getattr(getattr(sys, name), "closed", True):
                setattr(sys, name, _reopened(fd))
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            # None is a handler that was not set by Python.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _copy(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)


def _moved(fd: int) -> int:
    copy = _copy(fd)
    os.close(fd)
    return copy


def _settable_signals() -> Iterator[signal.Signals]:
    for number in signal.Signals:
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            yield number


def _reopened(fd: int) -> IO[str]:
    return open(fd, "w", buffering=1, errors="backslashreplace", closefd=False)
