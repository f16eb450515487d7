"""Run folders of commands that were killed between making one and writing what it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from announced import LAZILY, announced
from conftest import ROOT
from fault_folders import GUARD_S

from harness.run import unfinished

LONG_AGO_S = 1.7e9

PAUSE = "print('here', flush=True); sys.stdin.readline()"

CODE = """
import os, sys
from contextlib import ExitStack
from pathlib import Path
from harness.run import processes, run_folder
from announced import announced
def pause(*arguments):
    {pause}
    return arguments
{patch}
with announced(Path(sys.argv[1]), ["case-1"]):
    pass
"""

BEFORE_THE_LOCK = """
take_lock = run_folder.take_lock
run_folder.take_lock = lambda path: (pause(), take_lock(path))[1]
"""

BEFORE_THE_RUN_FILE = """
write_run = run_folder.RunFolder.write_run
run_folder.RunFolder.write_run = lambda self, run: (pause(), write_run(self, run))[1]
"""

SUBMISSION = """
import sys
from pathlib import Path
from harness.run.run_folder import submitted_run
with submitted_run(Path(sys.argv[1])):
    {pause}
"""


@contextmanager
def held_at(patch: str, results: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in another process that waits at one step of its beginning."""
    with held_in(CODE.format(pause=PAUSE, patch=patch), results) as process:
        yield process


@contextmanager
def held_in(code: str, results: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs code and waits in it."""
    with subprocess.Popen(
        [sys.executable, "-c", LAZILY + code, str(results)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def folders(results: Path) -> set[str]:
    return {path.name for path in (results / "runs").iterdir()}


def age(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))


@pytest.mark.parametrize("patch", [BEFORE_THE_LOCK, BEFORE_THE_RUN_FILE], ids=["lock", "run file"])
def test_one_that_is_just_being_made_stays(patch: str, tmp_path: Path) -> None:
    """However long that takes, as of a process that is stopped."""
    with held_at(patch, tmp_path) as process:
        (name,) = folders(tmp_path)
        age(tmp_path / "runs" / name)
        with announced(tmp_path, ["case-2"]):
            assert name in folders(tmp_path)
        assert folders(tmp_path) == {name}
        process.communicate("go on\n", timeout=GUARD_S)
        assert process.returncode == 0
    assert folders(tmp_path) == set()


def test_one_of_a_killed_command_goes(tmp_path: Path) -> None:
    with held_at(BEFORE_THE_RUN_FILE, tmp_path) as process:
        (name,) = folders(tmp_path)
        process.kill()
        process.wait()
        with announced(tmp_path, ["case-2"]):
            assert name not in folders(tmp_path)


def test_a_submission_that_is_stopped_for_hours_keeps_its_folder(tmp_path: Path) -> None:
    with held_in(SUBMISSION.format(pause=PAUSE), tmp_path) as process:
        (name,) = folders(tmp_path)
        age(tmp_path / "runs" / name)
        with announced(tmp_path, ["case-2"]):
            assert name in folders(tmp_path)
        process.communicate("go on\n", timeout=GUARD_S)
        assert process.returncode == 0
    assert not (tmp_path / "runs" / name / "lock").exists()


def test_a_submission_that_was_killed_as_it_began_goes(tmp_path: Path) -> None:
    with held_in(SUBMISSION.format(pause=PAUSE), tmp_path) as process:
        (name,) = folders(tmp_path)
        process.kill()
        process.wait()
        with announced(tmp_path, ["case-2"]):
            assert name not in folders(tmp_path)


def make(results: Path, *names: str) -> Path:
    folder = results / "runs" / "20260101T000000-0123abcd"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("names", [(), ("share-0.json", "share-1.json"), ("run.json.x.tmp",)])
def test_without_a_lock_the_old_go_and_the_new_stay(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = make(tmp_path, *names)
    with announced(tmp_path, ["case-1"]):
        assert folder.exists()
    age(folder)
    with announced(tmp_path, ["case-1"]):
        assert not folder.exists()


def test_age_is_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    unfinished.remove(tmp_path / "runs")
    assert folder.exists()


@pytest.mark.parametrize("name", ["notes.txt", "run.json", "share-0.json.mine"])
def test_a_folder_with_anything_else_stays(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, name)
    age(folder)
    unfinished.remove(tmp_path / "runs")
    assert (folder / name).exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(elsewhere)
    unfinished.remove(tmp_path / "runs")
    assert (elsewhere / "lock").exists()


def test_where_nothing_can_be_removed(tmp_path: Path) -> None:
    unfinished.remove(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
