"""Processes that cases start, under the real command and the real workers: none is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from conftest import Command
from fault_folders import (
    Folder,
    descendants,
    is_alive,
    no_process_left,
    wait_until,
    wait_until_held,
)


def daemons(path: Path) -> list[int]:
    return [int(file.name.partition("-")[2]) for file in path.glob("daemon-*")]


def is_left(pid: int) -> bool:
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


@contextmanager
def no_daemon_left(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in filter(is_left, daemons(path)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_nothing_survives_the_kill_of_the_command(tmp_path: Path, command: Command) -> None:
    """Neither workers nor their children nor daemons, which are nobody's children then."""
    folder = Folder(path=tmp_path, command=command)
    (tmp_path / "hold").touch()
    process = folder.start("attention=held_daemon")
    with no_process_left(process), no_daemon_left(tmp_path):
        wait_until_held(folder)
        family = [*descendants(process.pid), *map(psutil.Process, daemons(tmp_path))]
        assert len(family) >= 4, "a worker, its child, a daemon, and the guard of the run"
        process.kill()
        wait_until(lambda: not any(map(is_alive, family)), "all end")
