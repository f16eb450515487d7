"""Claims: locks by which processes that share a results folder divide its cases."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_WHOLE_FILE = 0
"""A lock of this length reaches beyond the last byte that any case has."""


class Claims:
    """The claims of one results folder; the operating system drops those of a process that dies."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._fd: int | None = None

    @contextlib.contextmanager
    def one(self, case_id: str, *, wait: bool) -> Iterator[bool]:
        """Hold the right to measure a case; yields False if another process holds it.

        With ``wait`` it waits for the other process and then yields True.
        """
        # One byte of one file per case: byte-range locks need no file per case, and work on
        # the network file systems that clusters share.
        offset = int(case_id.rsplit("-", 1)[-1], 16) if "-" in case_id else 0
        with self._held(1, offset, wait=wait) as held:
            yield held

    @contextlib.contextmanager
    def all(self) -> Iterator[bool]:
        """Hold the right to measure every case; yields False if another process holds any."""
        with self._held(_WHOLE_FILE, 0, wait=False) as held:
            yield held

    @contextlib.contextmanager
    def _held(self, length: int, offset: int, *, wait: bool) -> Iterator[bool]:
        if self._fd is None:
            self._fd = _open(self._lock)
        mode = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.lockf(self._fd, mode, length, offset)
        except (BlockingIOError, PermissionError):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, length, offset)


def _open(path: Path) -> int:
    """A descriptor of the file that is locked, which is created if there is none.

    Raises OSError where something else lies there, which a link may have put outside the folder.
    """
    # As many may write it as the user's umask allows: who shares the folder locks it as well.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
    return fd
