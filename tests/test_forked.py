"""Forked programs are what a process of their own would be; see :mod:`forked`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT
from forked import WITHOUT_GPU, ForkedPython, can_fork, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux")

LOOK = """
import json, os, signal, sys, tempfile
print(json.dumps({
    "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "cwd": os.getcwd(),
    "argv": sys.argv, "path": sys.path[0], "main": __name__, "temporary": tempfile.gettempdir(),
    "fds": [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")],
    "marked": "MARK=a-1" in open("/proc/self/environ").read().split(chr(0)),
    "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))[1:],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "hangup": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,
    "environment": sorted(os.environ), "input": sys.stdin.read(),
}))
"""


def look(popen: type[subprocess.Popen[Any]], folder: Path) -> dict[str, Any]:
    """What such a program sees of itself."""
    environment = os.environ | WITHOUT_GPU | {"MARK": "a-1", "TMPDIR": str(folder)}
    environment.pop("PYTHONPATH", None)
    with popen(
        [sys.executable, "-c", LOOK, "one", "two words"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        stdout, _ = process.communicate("given")
    assert process.returncode == 0
    return dict(json.loads(stdout))


def test_a_program_sees_what_it_sees_alone(tmp_path: Path) -> None:
    forked, alone = look(ForkedPython, tmp_path), look(subprocess.Popen, tmp_path)
    assert forked["parent"] == os.getpid()
    assert forked["marked"]
    # The one that is left is the folder that was listed, and the way to a server of workers.
    assert len(forked.pop("fds")) <= len(alone.pop("fds")) + 1
    # A directory of the caller's own comes first in both; -c says so with an empty word.
    assert [forked.pop("path"), alone.pop("path")] == [str(tmp_path), ""]
    assert forked == alone


@pytest.mark.parametrize(
    ("code", "returncode", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(7)", 7, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)
def test_how_it_ends(code: str, returncode: int, said: str) -> None:
    done = run_python("-c", code, environment={})
    assert done.returncode == returncode
    assert done.stderr.endswith(said)


def test_what_modules_read_when_they_are_imported_takes_a_new_interpreter() -> None:
    here = os.environ | WITHOUT_GPU
    assert can_fork(here)
    assert can_fork(here | {"PYTHONPATH": "elsewhere", "ATTNBENCH_PLUGINS": "any"})
    for name in ("PYTHONIOENCODING", "LC_ALL", "TRITON_INTERPRET", "OMP_NUM_THREADS"):
        assert not can_fork(here | {name: "another"})


def test_nothing_of_it_is_left() -> None:
    """Neither a stopped program nor the server of its workers."""
    code = "import time; print('began', flush=True); time.sleep(1000)"
    with ForkedPython(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert len(family) == 1
    gone, left = psutil.wait_procs(family, timeout=60)
    assert not [item for item in left if item.status() != psutil.STATUS_ZOMBIE], gone
