"""A worker's family: all that it has started, however deep, and how it ends with the worker.

A worker is the subreaper of its descendants (Linux: prctl(2), PR_SET_CHILD_SUBREAPER), so a daemon
that detaches itself stays below it; the parent is the subreaper of its workers, and adopts what
one that died has left. Both recognise strays by a mark in their environment. Elsewhere than on
Linux the children of a worker are ended, and daemons are not found.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from harness.run.children.guard_main import marked

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_GUARD = Path(__file__).with_name("guard_main.py")
_ROUNDS = 50
"""How often a family is looked through for further members that start others all the time."""

_END_S = 5.0
_lock = threading.Lock()
_counter = itertools.count(1)
_run = ""
_guard: subprocess.Popen[bytes] | None = None


def set_process_option(option: int, value: int) -> None:
    """Set an option of this process (Linux: prctl(2)); elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def new_mark() -> str:
    """The mark of a new worker of this process, whose run a guard watches from now on."""
    global _run, _guard
    with _lock:
        if not _run.startswith(f"{os.getpid()}-"):
            _run, _guard = f"{os.getpid()}-{secrets.token_hex(8)}-", None
        if sys.platform == "linux" and (_guard is None or _guard.poll() is not None):
            set_process_option(PR_SET_CHILD_SUBREAPER, 1)
            _guard = _start_guard(_run)
            atexit.register(dismiss_guard)
        return f"{_run}{next(_counter)}"


def _start_guard(mark: str) -> subprocess.Popen[bytes]:
    """A process that ends the run's others after this one; the end of a pipe tells it when."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_GUARD), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss_guard() -> None:
    """End the guard, which looks once more for what is left of the run."""
    global _guard
    with _lock:
        guard, _guard = _guard, None
    if guard is not None and guard.stdin is not None:
        guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(timeout=_END_S)


def kill_family(process: subprocess.Popen[bytes], mark: str) -> set[int]:
    """Kill a worker and all that it has started; returns the others' process ids.

    The worker is stopped first and killed last, so that it neither starts more nor lets go of what
    it has.
    """
    if not has_ended(process):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGSTOP)
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        found = _members(process, mark) - killed
        if not found:
            break
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    if process.returncode is None:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
    return killed


def _members(process: subprocess.Popen[bytes], mark: str) -> set[int]:
    found = marked(mark)
    # Once it has been waited for, its number may belong to another process.
    if process.returncode is None:
        with contextlib.suppress(psutil.Error):
            found |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if os.getsid(pid) == process.pid:
                    found.add(pid)
    return found - {process.pid, os.getpid()}


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended; it is not waited for, so that its number stays its own."""
    if process.returncode is not None:
        return True
    try:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, options) is not None
    except ChildProcessError:
        return True


def reap(pids: set[int]) -> None:
    """Wait until killed processes are gone, also those that this process has adopted."""
    until = time.monotonic() + _END_S
    left = set(pids)
    while left and time.monotonic() < until:
        left = {pid for pid in left if not _is_gone(pid)}
        if left:
            time.sleep(0.005)


def _is_gone(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        # Another's child: it may stay a zombie for as long as its parent wants.
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True
