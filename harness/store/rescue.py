"""Records that a full or read-only results folder could not take, kept until it can.

They lie in a private folder of the user, ``attnbench/rescued/NAME`` under ``XDG_STATE_HOME`` (by
default ``~/.local/state``), where NAME is a hash of the results folder's path; the next command
that measures into that folder moves them there. Where the home cannot be written either, a new
private folder beside other temporary files takes the record, and a person has to move it. No file
is overwritten and no link followed, and a folder that belongs to somebody else, or that others can
write, is not used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.store.regular import MAX_BYTES


def keep(results: Path, name: str, data: bytes) -> str:
    """Save a record's file elsewhere; returns a clause that says where it is."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _folder(results)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        called = _create(path, name, data)
        return f"it is kept as {path / called}; the next run into this folder takes it from there"
    with contextlib.suppress(OSError):
        # Of mode 700, with a name that nobody could know before.
        path = Path(tempfile.mkdtemp(prefix="attnbench-rescued-"))
        called = _create(path, name, data)
        return f"it is kept as {path / called}; move it to {results / 'records'} once there is room"
    return "and no other place took it either"


@dataclass(frozen=True, slots=True)
class Kept:
    """A file that is kept."""

    data: bytes
    remove: Callable[[], None]


@contextlib.contextmanager
def taking(results: Path) -> Iterator[list[Kept]]:
    """The files that are kept of a results folder, which no other process takes meanwhile."""
    with contextlib.ExitStack() as stack:
        found: list[Kept] = []
        with contextlib.suppress(OSError, RuntimeError):
            folder = stack.enter_context(_private(_folder(results)))
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in sorted(os.listdir(folder)):
                data = _read(folder, name)
                if data is not None:
                    found.append(Kept(data, partial(os.unlink, name, dir_fd=folder)))
        yield found


def _folder(results: Path) -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    # The specification has relative paths ignored.
    home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    digest = hashlib.sha256(os.fsencode(results.resolve())).hexdigest()[:16]
    return home / "attnbench" / "rescued" / digest


@contextlib.contextmanager
def _private(path: Path) -> Iterator[int]:
    """A descriptor of a folder that this user alone can use. Raises OSError of any other."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(folder)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, "not a private folder", str(path))
        yield folder
    finally:
        os.close(folder)


def _create(path: Path, name: str, data: bytes) -> str:
    """A new file of the name, or of the name with a number; returns what it is called."""
    stem = name.removesuffix(".json")
    with _private(path) as folder:
        for number in range(1, 10_000):
            called = f"{stem}.json" if number == 1 else f"{stem}.{number}.json"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                fd = os.open(called, flags, 0o600, dir_fd=folder)
            except FileExistsError:
                continue
            try:
                with open(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    with contextlib.suppress(OSError):
                        os.fsync(fd)
            except OSError:
                # Half a record is of no use.
                os.unlink(called, dir_fd=folder)
                raise
            return called
    raise FileExistsError(name)


def _read(folder: int, name: str) -> bytes | None:
    """A regular file of this user's; None for anything else."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except OSError:
        return None
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        is_mine = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
        return file.read() if is_mine and about.st_size <= MAX_BYTES else None
