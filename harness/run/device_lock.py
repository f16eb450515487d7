"""A lock on a device, because two runs that measure on it at once disturb each other.

The lock (flock(2)) lies on an empty file that every user can open for reading, which is all that a
lock needs: where ``fs.protected_regular`` is set, nobody may open another user's file in /tmp with
O_CREAT. The operating system releases it when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.printing import warn

FURTHER_PLACES = ("/run/lock", "/dev/shm")
"""Folders that every user may write to, for hosts whose temporary folder is full or read-only."""

_said: set[str] = set()


@contextlib.contextmanager
def exclusive_device(device: str, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold a device against other runs on this host, of all users, waiting for them if necessary.

    The lock is a file in the temporary folder (TMPDIR), so runs with different ones do not see
    each other. Runs that see different GPUs (CUDA_VISIBLE_DEVICES) do not wait for each other. In
    a Slurm job that variable may count from 0 on any GPUs, so Slurm's own variables come first.
    Where there is no lock, one line on stderr says so, and the run measures.
    """
    lock, problems = _open_lock(_lock_name(device))
    if problems:
        _say_once(f"no lock on the {device} ({'; '.join(problems)})")
    if lock is None:
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            _say_once(f"no lock on the {device} ({error.strerror})")
        yield
    finally:
        os.close(lock)


def _lock_name(device: str) -> str:
    visible = ""
    if device == "cuda":
        names = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
        visible = next((os.environ[name] for name in names if name in os.environ), "all")
    # A list of UUIDs of GPUs may be longer than a file's name.
    name = re.sub(r"[^a-z0-9]+", "_", f"{device} {visible}".lower())[:200]
    return f"attnbench_{name}.lock"


def _open_lock(name: str) -> tuple[int | None, list[str]]:
    """The open lock in the first place that has one or takes one.

    Also returns why runs of others may hold another: a file that they can open and this user
    cannot, or that there is no place at all.
    """
    reasons: list[str] = []
    for place in (*_temporary(), *FURTHER_PLACES):
        path = Path(place) / name
        try:
            return _open(path), []
        except PermissionError as error:
            reasons.append(f"{path}: {error.strerror}")
            if path.exists():
                # Whoever may open it locks it there.
                return None, reasons
        except OSError as error:
            reasons.append(f"{path}: {error.strerror or error}")
    return None, reasons


def _temporary() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [tempfile.gettempdir()]
    return []


def _open(path: Path) -> int:
    """A descriptor of the lock, which is created if there is none; OSError if it is no file."""
    # Somebody may have put a link here, or a pipe whose other end never comes.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            # Another run has just created it.
            fd = os.open(path, flags)
        else:
            # Others are to open it whatever this user's umask is.
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warn(f"{message}: runs of other users may disturb this one's times")
