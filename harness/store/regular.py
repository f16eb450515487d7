"""Reads files that others may have put into a folder: regular ones alone, up to a size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from harness.escapes import printable

MAX_BYTES = 128 * 2**20
"""Most bytes of a file that is read: the largest committed record has 0.4 MB."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular(path: Path, limit_bytes: int = MAX_BYTES) -> tuple[bytes, float]:
    """The bytes of a regular file, or of one that a link leads to, and when it was written.

    Raises OSError where something else lies there, which is not opened (a FIFO would wait for a
    writer, and a device act), or where the file is larger than the limit.
    """
    _require_regular(os.stat(path))
    # Another thing may have taken its place since, which must not make the opening wait.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        _require_regular(about)
        if about.st_size > limit_bytes:
            size, limit = about.st_size >> 20, limit_bytes >> 20
            raise OSError(errno.EFBIG, f"{size:,} MiB, and at most {limit:,} are read")
        return file.read(limit_bytes), about.st_mtime


def unlisted(folder: Path) -> list[str]:
    """One line if a folder cannot be listed, unless there is none."""
    try:
        with os.scandir(folder):
            return []
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return []
        return [printable(f"{folder}: not a readable folder ({error.strerror})")]


def require_inside(folder: Path, results: Path) -> None:
    """Raise OSError for a folder of ``results`` that a link puts elsewhere, and is not written."""
    if not folder.resolve().is_relative_to(results.resolve()):
        raise OSError(errno.EXDEV, "a link leads out of the results folder", str(folder))


def _require_regular(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file; move it away")
