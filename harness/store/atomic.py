"""Atomic writes: a file is written aside and put in place whole, so that no reader sees half."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a file in one step, in the place of an older one.

    Args:
        sync: wait until the data is on the disk, so that a crash of the host cannot lose it.
    """
    _write_aside(path, data, sync, os.replace)


def create(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet, and wait until it is on the disk.

    Raises FileExistsError, also where another process has created it at the same moment.
    """
    _write_aside(path, data, True, os.link)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, which syncing a file leaves out."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_aside(
    path: Path, data: bytes, sync: bool, put_in_place: Callable[[str, Path], None]
) -> None:
    fd, aside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        put_in_place(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)
