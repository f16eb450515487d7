"""The lock on a device: files of other users, and what somebody may have put in its place."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from fault_folders import GUARD_S, wait_until

from harness.run import device_lock
from harness.run.device_lock import exclusive_device

NAME = "attnbench_cpu_.lock"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A temporary folder, and another that every user may write to."""
    made = [tmp_path / "tmp", tmp_path / "run-lock"]
    for place in made:
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made[0]))
    monkeypatch.setattr(device_lock, "FURTHER_PLACES", (str(made[1]),))
    monkeypatch.setattr(device_lock, "_said", set())
    return made


def is_exclusive() -> bool:
    """Whether a second run would have to wait while this one measures."""
    waits = threading.Event()

    def second() -> None:
        with exclusive_device("cpu", waits.set):
            ended.set()

    ended = threading.Event()
    thread = threading.Thread(target=second)
    with exclusive_device("cpu", lambda: None):
        thread.start()
        wait_until(lambda: waits.is_set() or ended.is_set(), "it waits, or has not to")
        waited = waits.is_set() and not ended.is_set()
    thread.join(GUARD_S)
    return waited


def test_others_can_open_it_whatever_the_umask(places: list[Path]) -> None:
    before = os.umask(0o077)
    try:
        with exclusive_device("cpu", lambda: None):
            mode = (places[0] / NAME).stat().st_mode
    finally:
        os.umask(before)
    assert stat.S_IMODE(mode) == 0o644


class TestAnotherUsersFile:
    @pytest.fixture
    def protected(
        self, places: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[int], None]:
        """Opens of the existing file that the kernel refuses where it belongs to another user."""
        real = os.open

        def refuse(forbidden: int) -> None:
            (places[0] / NAME).touch()

            def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
                if str(path) == str(places[0] / NAME) and (not forbidden or flags & forbidden):
                    raise PermissionError(13, "Permission denied")
                return real(path, flags, *rest, **more)

            monkeypatch.setattr(os, "open", open_)

        return refuse

    def test_with_protected_regular(
        self, protected: Callable[[int], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """fs.protected_regular forbids O_CREAT, and a lock needs none."""
        protected(os.O_CREAT)
        assert is_exclusive()
        assert capsys.readouterr().err == ""

    def test_that_this_user_may_not_open(
        self,
        protected: Callable[[int], None],
        places: list[Path],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """One line for the whole run, and it measures."""
        protected(0)
        for _ in range(3):
            with exclusive_device("cpu", lambda: None):
                pass
        assert capsys.readouterr().err == (
            f"attnbench: no lock on the cpu ({places[0] / NAME}: Permission denied): runs of other "
            "users may disturb this one's times\n"
        )


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.symlink_to(path.parents[1] / "elsewhere")


def a_link_to_a_file(path: Path) -> None:
    (path.parents[1] / "precious").write_text("precious", encoding="utf-8")
    path.symlink_to(path.parents[1] / "precious")


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


class TestPlanted:
    @pytest.mark.parametrize(
        "plant", [a_pipe, a_link, a_link_to_a_file, a_loop, a_folder, a_socket]
    )
    def test_the_lock_is_elsewhere_for_everybody(
        self,
        plant: Callable[[Path], None],
        places: list[Path],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        plant(places[0] / NAME)
        assert is_exclusive()
        assert (places[1] / NAME).is_file()
        assert not (tmp_path / "elsewhere").exists()
        assert capsys.readouterr().err == ""

    def test_everywhere(self, places: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
        for place in places:
            os.mkfifo(place / NAME)
        assert not is_exclusive()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("attnbench: no lock on the cpu (")
        assert line.count("not a regular file") == 2


class TestNoPlace:
    @pytest.mark.parametrize("number", [13, 28, 30])
    def test_says_so_once(
        self,
        number: int,
        places: list[Path],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Folders that nobody may write to, that are full, or read-only."""
        real = os.open

        def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(number, os.strerror(number))
            return real(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", open_)
        for _ in range(2):
            with exclusive_device("cpu", lambda: None):
                pass
        (line,) = capsys.readouterr().err.splitlines()
        assert line.count(os.strerror(number)) == len(places)

    def test_a_file_system_without_locks(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(fd: int, mode: int) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(device_lock.fcntl, "flock", refuse)
        with exclusive_device("cpu", lambda: None):
            pass
        assert "no lock on the cpu (No locks available)" in capsys.readouterr().err

    def test_no_temporary_folder(self, monkeypatch: pytest.MonkeyPatch, places: list[Path]) -> None:
        def none() -> str:
            raise FileNotFoundError(2, "No usable temporary directory found")

        monkeypatch.setattr(tempfile, "gettempdir", none)
        assert is_exclusive()
        assert (places[1] / NAME).is_file()


def test_two_that_create_it_at_the_same_moment(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is quicker: O_EXCL fails, and its file is the lock."""
    real = os.open
    path = places[0] / NAME

    def open_(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(name) == str(path):
            os.mknod(path, 0o644)
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", open_)
    assert is_exclusive()
    assert not (places[1] / NAME).exists()


def test_released_by_the_kernel(places: list[Path]) -> None:
    code = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from harness.run.device_lock import exclusive_device\n"
        "with exclusive_device('cpu', print): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(places[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waited = []

        def on_wait() -> None:
            waited.append(True)
            holder.kill()

        with exclusive_device("cpu", on_wait):
            assert waited == [True]
