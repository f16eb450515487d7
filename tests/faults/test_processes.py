"""Which process a run file names: clocks that are set, numbers used again, who may be stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from announced import LAZILY, announced, manifest, states, the_run
from conftest import ROOT, Command
from fault_folders import GUARD_S, Folder, no_process_left, wait_until, wait_until_held
from records import make_record

from harness.commands.cancel import main as cancel_main
from harness.commands.status import look
from harness.commands.status import main as status_main
from harness.run import processes
from harness.run.run_folder import RunFolder, runs_of
from harness.store.record import RecordStore

IDS = ["case-1", "case-2"]


class SetClock:
    """A clock that somebody sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.ahead_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    return SetClock(monkeypatch)


class TestClock:
    @pytest.mark.parametrize("ahead_s", [86400.0, -86400.0])
    def test_a_living_run_stays(self, ahead_s: float, tmp_path: Path, clock: SetClock) -> None:
        """The clock is set while the run measures; then another command begins and ends."""
        # The kernel's clock stays as it is here, so the run's is set the other way.
        clock.ahead_s = -ahead_s
        with announced(tmp_path, IDS):
            clock.ahead_s = 0.0
            assert states(look(tmp_path).cases) == {"case-1": "running", "case-2": "pending"}
            first, _ = the_run(tmp_path)
            with announced(tmp_path, ["case-3"]):
                assert len(runs_of(tmp_path)) == 2
            assert states(look(tmp_path).cases)["case-1"] == "running"
            assert first.path.is_dir()
        assert runs_of(tmp_path) == []

    @pytest.mark.parametrize("ahead_s", [86400.0, -86400.0])
    def test_durations(self, ahead_s: float, tmp_path: Path, clock: SetClock) -> None:
        with announced(tmp_path, IDS):
            clock.ahead_s = ahead_s
            (detail,) = (case.detail for case in look(tmp_path).cases if case.status == "running")
            assert detail.endswith((", for 0:00", ", for 0:01", ", for 0:02"))

    def test_what_is_recorded_after_the_clock_was_set_back(
        self, tmp_path: Path, clock: SetClock
    ) -> None:
        """The run began at a later time than its record was written at."""
        record = make_record(attention="naive", samples_ms={"step": [[1.0] * 3]})
        clock.ahead_s = 86400.0
        with announced(tmp_path, [record.case_id, "case-2"]):
            clock.ahead_s = 0.0
            RecordStore(tmp_path).write(record)
            status = look(tmp_path)
        assert states(status.cases) == {record.case_id: "ok", "case-2": "pending"}


def rewrite(results: Path, **changed: Any) -> None:
    """Change fields of the only run file; those of its process by ``process__NAME``."""
    folder, _ = the_run(results)
    path = folder.path / "run.json"
    values = json.loads(path.read_bytes())
    for name, value in changed.items():
        place = values["process"] if name.startswith("process__") else values
        place[name.removeprefix("process__")] = value
    path.write_text(json.dumps(values))


def is_alive(results: Path) -> bool:
    folder, run = the_run(results)
    return folder.is_running(run)


class TestIdentity:
    @pytest.fixture(autouse=True)
    def in_a_run(self, tmp_path: Path) -> Iterator[None]:
        with announced(tmp_path, IDS):
            yield

    def test_of_this_process(self, tmp_path: Path) -> None:
        identity = manifest(tmp_path).process
        assert identity is not None
        assert identity.start_ticks == processes.start_ticks(os.getpid())
        assert identity.locked
        assert is_alive(tmp_path)

    def test_a_number_used_again(self, tmp_path: Path) -> None:
        rewrite(tmp_path, process__start_ticks=5)
        assert not is_alive(tmp_path)

    def test_no_such_process(self, tmp_path: Path) -> None:
        rewrite(tmp_path, pid=2**31 - 1)
        assert not is_alive(tmp_path)

    def test_a_zombie(self, tmp_path: Path) -> None:
        with subprocess.Popen(["true"]) as child:
            wait_until(lambda: processes.start_ticks(child.pid) is None, "it has ended")
            assert Path(f"/proc/{child.pid}").exists()
            rewrite(tmp_path, pid=child.pid)
            assert not is_alive(tmp_path)

    def test_after_a_restart(self, tmp_path: Path) -> None:
        """Another boot of this machine; its lock went with it."""
        folder, _ = the_run(tmp_path)
        folder.lock.unlink()
        folder.lock.touch()
        rewrite(tmp_path, process__boot_id="another")
        assert not is_alive(tmp_path)

    def test_another_machine_of_this_name(self, tmp_path: Path) -> None:
        rewrite(tmp_path, process__boot_id="another", process__machine_id="another")
        assert is_alive(tmp_path)

    def test_another_host(self, tmp_path: Path) -> None:
        rewrite(tmp_path, host="elsewhere", process__boot_id="another", pid=2**31 - 1)
        assert is_alive(tmp_path)

    def test_another_container_that_holds_its_lock(self, tmp_path: Path) -> None:
        rewrite(tmp_path, host="pod", process__pid_namespace="another", pid=2**31 - 1)
        assert is_alive(tmp_path)

    def test_another_container_that_ended(self, tmp_path: Path) -> None:
        folder, _ = the_run(tmp_path)
        folder.lock.unlink()
        folder.lock.touch()
        rewrite(tmp_path, host="pod", process__pid_namespace="another")
        assert not is_alive(tmp_path)

    def test_processes_of_others_are_hidden(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """/proc mounted with hidepid=2: the process exists, and nothing else is known of it."""

        def is_another_users(pid: int, number: int) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "kill", is_another_users)
        monkeypatch.setattr(processes, "start_ticks", lambda pid: None)
        rewrite(tmp_path, pid=2**31 - 1)
        assert is_alive(tmp_path)

    def test_a_file_system_without_locks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(fd: int, mode: int) -> None:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(processes.fcntl, "flock", refuse)
        with announced(tmp_path / "other", IDS):
            identity = manifest(tmp_path / "other").process
            assert identity is not None
            assert not identity.locked
            assert is_alive(tmp_path / "other")

    def test_a_file_of_before(self, tmp_path: Path) -> None:
        """Its process is known by its number alone, and must be attnbench."""
        folder, _ = the_run(tmp_path)
        path = folder.path / "run.json"
        values = json.loads(path.read_bytes())
        del values["process"]
        with subprocess.Popen(["sleep", "60"]) as other:
            for pid, expected in ((other.pid, False), (2**31 - 1, False)):
                path.write_text(json.dumps(values | {"pid": pid}))
                assert is_alive(tmp_path) == expected
            path.write_text(json.dumps(values | {"host": "elsewhere"}))
            assert is_alive(tmp_path)
            other.kill()


class TestWhatAKilledRunLeaves:
    def test_is_removed_by_the_next(self, tmp_path: Path) -> None:
        child = subprocess.run(
            [
                *(sys.executable, "-c"),
                LAZILY
                + "import os, sys; from pathlib import Path; from announced import announced\n"
                "with announced(Path(sys.argv[1]), ['case-1']): os.kill(os.getpid(), 9)",
                str(tmp_path),
            ],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"},
        )
        assert child.returncode == -signal.SIGKILL
        assert states(look(tmp_path).cases) == {"case-1": "missing"}
        (left,) = (tmp_path / "runs").iterdir()
        with announced(tmp_path, ["case-2"]):
            assert not left.exists()

    def test_two_in_the_same_moment(self, tmp_path: Path, clock: SetClock) -> None:
        with announced(tmp_path, ["case-1"]), announced(tmp_path, ["case-2"]):
            assert len(runs_of(tmp_path)) == 2

    def test_no_room_for_run_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The run measures all the same."""

        def full(self: RunFolder, run: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(RunFolder, "write_run", full)
        with announced(tmp_path, IDS):
            pass
        (line,) = capsys.readouterr().err.splitlines()
        assert "No space left on device" in line
        assert list((tmp_path / "runs").iterdir()) == []

    def test_a_folder_that_is_taken_away_while_it_runs(self, tmp_path: Path) -> None:
        with announced(tmp_path, IDS) as progress:
            shutil.rmtree(tmp_path / "runs")
            progress.stage("check")


class TestCancel:
    @pytest.fixture
    def victim(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["sleep", "600"]) as process:
            yield process
            process.kill()

    def forge(self, results: Path, victim: subprocess.Popen[bytes], **changed: Any) -> str:
        """Cancel by a run file that names the victim; returns what is printed."""
        with announced(results, IDS):
            rewrite(results, pid=victim.pid, **changed)
            assert cancel_main([str(results)]) == 0
        assert victim.poll() is None, "it was signalled"
        return "signalled nobody"

    def test_another_program(
        self, victim: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.forge(tmp_path, victim, process__start_ticks=processes.start_ticks(victim.pid))
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"process {victim.pid} of ")
        assert line.endswith("is not attnbench: not stopped")

    def test_a_number_used_again(
        self, victim: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.forge(tmp_path, victim)
        assert capsys.readouterr().out == "nothing is queued or running\n"

    def test_a_file_of_before(
        self, victim: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with announced(tmp_path, IDS):
            folder, _ = the_run(tmp_path)
            path = folder.path / "run.json"
            values = json.loads(path.read_bytes())
            del values["process"]
            path.write_text(json.dumps(values | {"pid": victim.pid, "created_s": 9e9}))
            assert cancel_main([str(tmp_path)]) == 0
        assert victim.poll() is None
        assert capsys.readouterr().out == "nothing is queued or running\n"

    def test_a_number_that_another_takes_between_two_looks(
        self,
        victim: subprocess.Popen[bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Whoever stops a process looks once more at what it is."""
        monkeypatch.setattr(processes, "is_attnbench", lambda pid: True)
        ours = processes.own_identity(locked=False)
        for changed in ({"start_ticks": 5}, {"boot_id": "another"}):
            of_another = msgspec.structs.replace(ours, **changed)
            refused = processes.stop(victim.pid, of_another, tmp_path / "lock")
            assert refused == "is not the one that wrote the run file"
        assert victim.poll() is None

    def test_another_users_process(
        self,
        victim: subprocess.Popen[bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        self.forge(tmp_path, victim, process__start_ticks=processes.start_ticks(victim.pid))
        assert "belongs to another user: not stopped" in capsys.readouterr().out

    def test_the_first_process_and_another_host(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with announced(tmp_path, IDS):
            rewrite(tmp_path, pid=1, process__start_ticks=processes.start_ticks(1))
            assert cancel_main([str(tmp_path)]) == 0
            assert ": not stopped\n" in capsys.readouterr().out
            rewrite(tmp_path, host="elsewhere", process__boot_id="another")
            assert cancel_main([str(tmp_path)]) == 0
            assert "process 1 runs on elsewhere: stop it there\n" in capsys.readouterr().out

    def test_a_run_elsewhere_by_a_copied_file_and_then_by_its_own(
        self, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Whoever copies a run file into a folder of theirs has the right number and start."""
        ours = Folder(path=tmp_path / "ours", command=command)
        (ours.path / "hold").touch()
        process = ours.start("attention=held")
        with no_process_left(process):
            wait_until_held(ours)
            theirs = tmp_path / "theirs"
            shutil.copytree(ours.results / "runs", theirs / "runs")
            assert states(look(theirs).cases).popitem()[1] == "running"
            assert cancel_main([str(theirs)]) == 0
            said = capsys.readouterr().out
            assert "does not hold the lock of the run folder: not stopped" in said
            assert process.poll() is None

            assert status_main([str(ours.results)]) == 0
            assert f"process {process.pid} on {socket.gethostname()}" in capsys.readouterr().out
            assert cancel_main([str(ours.results)]) == 0
            assert capsys.readouterr().out == f"stopped process {process.pid}\n"
            _, stderr = process.communicate(timeout=GUARD_S)
        assert process.returncode == 130
        assert "stopped; the same command goes on" in stderr

    def test_where_there_are_no_descriptors_of_processes(
        self,
        victim: subprocess.Popen[bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def too_old(pid: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", too_old)
        monkeypatch.setattr(processes, "is_attnbench", lambda pid: True)
        assert processes.stop(victim.pid, None, tmp_path / "lock") is None
        assert victim.wait(GUARD_S) == -signal.SIGTERM
