"""Which process a run file names, and whether that process still lives.

A process is known by its number and its start, in clock ticks since the kernel started
(``/proc/PID/stat``, field 22 of proc(5)), on one start of one kernel (``boot_id``), in one
namespace of process numbers. None of them depends on the clock that tells the time, which may be
set while a run lives. A process of another container or host cannot be looked up; it is known by
the lock (flock(2)) that it holds on a file of its run folder, and that the kernel drops when it
ends, where the file system carries locks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import socket
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec

PROC = Path("/proc")
MACHINE_ID = Path("/etc/machine-id")

MAX_PID = 2**31 - 1
"""The largest number that a pid_t holds."""


class ProcessIdentity(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Fields of a process that no other process shares; None is unknown on its host."""

    start_ticks: int | None
    boot_id: str | None
    """A digest; another one at each start of the kernel, the same in all containers on it."""
    machine_id: str | None
    """A digest; the same after a restart, but an image may give one to all its copies."""
    pid_namespace: str | None
    uid: int
    locked: bool
    """Whether it holds the lock of its run folder."""


def own_identity(*, locked: bool) -> ProcessIdentity:
    """The identity of this process."""
    return ProcessIdentity(
        start_ticks=start_ticks(os.getpid()),
        boot_id=boot_id(),
        machine_id=_digest(MACHINE_ID),
        pid_namespace=_pid_namespace(),
        uid=os.getuid(),
        locked=locked,
    )


def boot_id() -> str | None:
    """A digest of the identity of this start of the kernel."""
    return _digest(PROC / "sys/kernel/random/boot_id")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the kernel did.

    None if there is none, if it has ended and nobody has waited for it, or if this system does not
    say.
    """
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
        # The program's name is in brackets and may hold brackets and blanks itself.
        fields = text.rpartition(b")")[2].split()
        state, ticks = fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
    return None if state in (b"Z", b"X", b"x") else ticks


def is_same_process(host: str, pid: int, identity: ProcessIdentity | None, lock: Path) -> bool:
    """Whether the process that a run file names lives; assumed where nobody can tell.

    Args:
        identity: None in run files from before it was kept.
        lock: the lock of its run folder.
    """
    if identity is None:
        # Its number alone is known, and may be another process's by now.
        return host != socket.gethostname() or (exists(pid) and is_attnbench(pid) is not False)
    here = host == socket.gethostname()
    if identity.boot_id is None or boot_id() is None:
        held = is_held(lock)
        return not here or (exists(pid) if held is None else held)
    if not is_of_this_boot(identity):
        machine_id = _digest(MACHINE_ID)
        restarted = here and (identity.machine_id is None or identity.machine_id == machine_id)
        return not restarted or is_held(lock) is True
    if identity.pid_namespace == _pid_namespace() and identity.start_ticks is not None:
        found = start_ticks(pid)
        if found is not None or not exists(pid) or (PROC / str(pid)).exists():
            return found == identity.start_ticks
        # /proc hides other users' processes here (hidepid).
    # Another container on this kernel, whose locks are seen here too.
    return not identity.locked or is_held(lock) is not False


def can_be_seen(host: str, identity: ProcessIdentity | None) -> bool:
    """Whether this process sees the one of a run file by its number, should it live."""
    if identity is None or identity.boot_id is None:
        return host == socket.gethostname()
    return is_of_this_boot(identity) and identity.pid_namespace == _pid_namespace()


def is_of_this_boot(identity: ProcessIdentity) -> bool:
    """Whether a process runs, or ran, on this start of this host's kernel."""
    return identity.boot_id is not None and identity.boot_id == boot_id()


def why_not_stop(pid: int, identity: ProcessIdentity | None, lock: Path) -> str | None:
    """Why a living process must not be signalled by the run file that names it; None if it may."""
    try:
        owner = (PROC / str(pid)).stat().st_uid
    except OSError:
        return "cannot be looked up here"
    if owner != os.getuid():
        return "belongs to another user"
    if identity is not None and (
        not is_of_this_boot(identity) or start_ticks(pid) != identity.start_ticks
    ):
        return "is not the one that wrote the run file"
    if is_attnbench(pid) is not True:
        return "is not attnbench"
    if identity is not None and identity.locked and not _has_open(pid, lock):
        return "does not hold the lock of the run folder"
    return None


def stop(pid: int, identity: ProcessIdentity | None, lock: Path) -> str | None:
    """Ask the process of a run to stop, as Ctrl-C does; returns why it was not asked, or None.

    A descriptor of the process (pidfd_open(2)) is taken before it is looked at, so that a process
    that takes its number later is not signalled in its place.
    """
    fd = None
    try:
        with suppress(AttributeError, NotImplementedError):
            fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return "has ended"
    except OSError:
        # An older kernel, or a sandbox.
        fd = None
    try:
        if reason := why_not_stop(pid, identity, lock):
            return reason
        if fd is not None:
            signal.pidfd_send_signal(fd, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return "has ended"
    except PermissionError:
        return "belongs to another user"
    finally:
        if fd is not None:
            os.close(fd)
    return None


def exists(pid: int) -> bool:
    """Whether there is a process of this number, whoever's it is."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return start_ticks(pid) is not None or not (PROC / str(pid) / "stat").exists()


def is_attnbench(pid: int) -> bool | None:
    """Whether a process was started as attnbench; None if its command line cannot be seen."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    names = [word.rpartition(b"/")[2] for word in words]
    is_module = (b"-m", b"harness") in pairwise(words)
    is_file = any(word.endswith(b"harness/__main__.py") for word in words)
    return is_module or is_file or b"attnbench" in names


def take_lock(path: Path) -> int | None:
    """Lock a new file until this process ends or closes the descriptor that is returned.

    None where the file system has no locks.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def is_held(lock: Path) -> bool | None:
    """Whether another process holds the lock of a run folder; None if nobody can tell."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False


def _has_open(pid: int, path: Path) -> bool:
    try:
        wanted = path.lstat()
        descriptors = list((PROC / str(pid) / "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        with suppress(OSError):
            found = descriptor.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _pid_namespace() -> str | None:
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return None


def _digest(path: Path) -> str | None:
    with suppress(OSError):
        if text := path.read_text().strip():
            return hashlib.sha256(text.encode()).hexdigest()[:12]
    return None
