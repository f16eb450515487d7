"""Run folders without ``run.json``: of a run that is just beginning, or was killed as it began.

A command makes its folder and takes the folder's lock while it holds a shared lock (flock(2)) on
``runs``. A command that removes such folders holds that lock alone, so that no folder is between
the two steps, and leaves the folders whose own lock is held. Where a folder has no lock, as on file
systems without locks, only its age tells that nobody is making it any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.run.processes import is_held

OLD_S = 3600.0
"""No command takes as long from making a folder to writing its run file."""

_OURS = re.compile(r"lock|jobs|secret|(run|share-\d+|state-\d+)\.json(\..*\.tmp)?")
"""What a run folder may hold before its run file; one with anything else stays."""


@contextlib.contextmanager
def being_made(runs: Path) -> Iterator[None]:
    """Keep folders that do not have their lock yet from being removed."""
    with _locked(runs, fcntl.LOCK_SH):
        yield


def remove(runs: Path) -> None:
    """Remove folders that nobody is making; OSError leaves them to a later command."""
    with contextlib.suppress(OSError), _locked(runs, fcntl.LOCK_EX | fcntl.LOCK_NB) as has_locks:
        now_s = _file_system_time_s(runs)
        for folder in list(runs.iterdir()):
            with contextlib.suppress(OSError):
                if _is_left(folder, now_s, has_locks=has_locks):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(runs: Path, kind: int) -> Iterator[bool]:
    """Lock the folder; yields False where its file system has no locks.

    Raises BlockingIOError where ``kind`` does not wait and another process has it.
    """
    fd = os.open(runs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        has_locks = True
        try:
            fcntl.flock(fd, kind)
        except BlockingIOError:
            raise
        except OSError:
            has_locks = False
        yield has_locks
    finally:
        os.close(fd)


def _is_left(folder: Path, now_s: float, *, has_locks: bool) -> bool:
    if folder.name.startswith(".") or folder.is_symlink() or not folder.is_dir():
        return False
    names = os.listdir(folder)
    if "run.json" in names or not all(map(_OURS.fullmatch, names)):
        return False
    held = is_held(folder / "lock")
    if held is False and has_locks:
        return True
    files = [folder, *(folder / name for name in names)]
    newest_s = max(path.lstat().st_mtime for path in files)
    return not held and now_s - newest_s > OLD_S


def _file_system_time_s(folder: Path) -> float:
    """The time that the file system would give a file now, whatever this host's clock says."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
