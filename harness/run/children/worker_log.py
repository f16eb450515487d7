"""The log of a worker: what it printed, of limited size, under a name of its own.

Nobody stands between the worker and the file, so that printing never blocks it and no further
process wakes while it measures. The parent, which wakes twice a second anyway, cuts the middle
out of a log that has grown too long; the worker writes in append mode, and so goes on behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

MAX_BYTES = 16 * 2**20
"""A log that has grown beyond is cut to its first :data:`HEAD_BYTES` and its last
:data:`TAIL_BYTES`."""

HEAD_BYTES = 2**20
TAIL_BYTES = 7 * 2**20

KEPT_LOGS = 200
"""Logs of workers that have ended which a folder keeps; empty ones go first, then the oldest."""

_LINES_BYTES = 64 * 1024
_LINE_LENGTH = 1000

_numbers: dict[Path, int] = {}


class WorkerLog:
    """A new file in ``folder``, named after ``stem`` and, for a replacement, its number."""

    def __init__(self, folder: Path, stem: str) -> None:
        self._cut_bytes = 0
        self.path, self.fd = _create(folder, stem)
        # Tells others that the worker lives: it inherits the open file, and with it the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def trim(self) -> None:
        """Cut the middle out of a log that is too long. Never fails."""
        with contextlib.suppress(OSError):
            size = os.fstat(self.fd).st_size
            if size <= MAX_BYTES:
                return
            tail = os.pread(self.fd, TAIL_BYTES, size - TAIL_BYTES)
            before = len(_notice(self._cut_bytes)) if self._cut_bytes else 0
            self._cut_bytes += size - TAIL_BYTES - HEAD_BYTES - before
            os.ftruncate(self.fd, HEAD_BYTES)
            os.write(self.fd, _notice(self._cut_bytes) + tail)

    def lines(self, number: int) -> list[str]:
        """The last lines, each cut to a length that a record can hold."""
        try:
            size = os.fstat(self.fd).st_size
            start = max(0, size - _LINES_BYTES)
            text = os.pread(self.fd, _LINES_BYTES, start).decode(errors="replace")
        except OSError:
            return []
        lines = text.splitlines()
        if start > 0 and len(lines) > number:
            del lines[0]
        return [_shortened(line) for line in lines[-number:]]

    def close(self) -> None:
        self.trim()
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = -1


def prune(folder: Path) -> None:
    """Remove logs of ended workers beyond :data:`KEPT_LOGS`. Never fails."""
    found = []
    for path in folder.glob("worker-*.log"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            found.append((status.st_size > 0, status.st_mtime_ns, path))
    for _, _, path in sorted(found)[: max(0, len(found) - KEPT_LOGS)]:
        with contextlib.suppress(OSError):
            _remove_if_ended(path)


def _create(folder: Path, stem: str) -> tuple[Path, int]:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        number = _numbers[folder / stem] = _numbers.get(folder / stem, 0) + 1
        path = folder / (f"{stem}.{number}.log" if number > 1 else f"{stem}.log")
        # An earlier process of the same number may have left one.
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, flags, 0o644)


def _remove_if_ended(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(fd)


def _notice(cut_bytes: int) -> bytes:
    return (
        f"\n[attnbench cut {cut_bytes} bytes here: a log keeps its first {HEAD_BYTES >> 20} MiB "
        f"and at least its last {TAIL_BYTES >> 20}]\n"
    ).encode()


def _shortened(line: str) -> str:
    if len(line) <= _LINE_LENGTH:
        return line
    return f"{line[:_LINE_LENGTH]} ... ({len(line) - _LINE_LENGTH} characters more)"
