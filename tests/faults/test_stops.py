"""Ends of a run that come from outside: closed terminals, nohup, SIGQUIT, a second Ctrl-C."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from announced import announced
from conftest import ROOT, Command
from fault_folders import (
    GUARD_S,
    Folder,
    descendants,
    is_alive,
    no_process_left,
    stops_cleanly,
    wait_until,
    wait_until_held,
    workers_of,
)


class TestTerminal:
    def test_is_closed(self, tmp_path: Path, command: Command) -> None:
        """The kernel sends SIGHUP, and every write to the terminal fails from then on."""
        folder = Folder(path=tmp_path, command=command)
        (tmp_path / "hold").touch()
        ours, theirs = pty.openpty()

        def take_terminal() -> None:
            # Tests may run under nohup, which a command rightly inherits.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
            os.dup2(theirs, 1)

        process = folder.start("attention=naive,held", preexec_fn=take_terminal)
        os.close(theirs)
        with no_process_left(process):
            wait_until_held(folder)
            stops_cleanly(folder, process, lambda: os.close(ours), 129)

    def test_is_closed_under_nohup(self, tmp_path: Path, command: Command) -> None:
        folder = Folder(path=tmp_path, command=command)
        (tmp_path / "hold").touch()
        process = folder.start(
            "attention=held", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
        )
        with no_process_left(process):
            wait_until_held(folder)
            process.send_signal(signal.SIGHUP)
            (tmp_path / "hold").unlink()
            _, stderr = process.communicate(timeout=GUARD_S)
            assert (process.returncode, stderr) == (0, "")
        assert folder.records()["held"]["status"] == "ok"


class TestQuit:
    def test_leaves_no_process_and_the_next_run_tidies(
        self, tmp_path: Path, command: Command
    ) -> None:
        """SIGQUIT ends the command at once, for when Ctrl-C does not."""
        folder = Folder(path=tmp_path, command=command)
        (tmp_path / "hold").touch()
        process = folder.start("attention=held")
        with no_process_left(process):
            wait_until_held(folder)
            workers = workers_of(process)
            children = [child for worker in workers for child in descendants(worker.pid)]
            process.send_signal(signal.SIGQUIT)
            process.communicate(timeout=GUARD_S)
            assert process.returncode == -signal.SIGQUIT
            wait_until(lambda: not any(map(is_alive, workers)), "workers end")
            for child in children:
                child.kill()
        (left,) = (folder.results / "runs").iterdir()
        with announced(folder.results, ["case-1"]):
            assert not left.exists()


class TestStart:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_while_modules_load(self, number: signal.Signals, tmp_path: Path) -> None:
        """Before the command has looked at its arguments."""
        code = (
            "import os, sys; from harness.commands import console, lazy_imports\n"
            "install = lazy_imports.install\n"
            f"lazy_imports.install = lambda: (install(), os.kill(os.getpid(), {int(number)}))\n"
            "sys.exit(console.attnbench())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "plan=true", "model=tiny", f"results={tmp_path / 'r'}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=GUARD_S,
            check=False,
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
        assert done.returncode in (130, -number)
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "r").exists()


class TestFolders:
    def test_the_working_folder_is_gone(self, tmp_path: Path) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        command = [sys.executable, "-m", "harness", "plan=true", "model=tiny"]
        done = subprocess.run(
            ["sh", "-c", 'rmdir "$PWD" && exec "$0" "$@"', *command, f"results={tmp_path / 'r'}"],
            capture_output=True,
            text=True,
            cwd=gone,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=GUARD_S,
            check=False,
        )
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("attnbench: the working folder is gone")

    def test_the_results_are_moved_away_while_it_measures(
        self, tmp_path: Path, command: Command
    ) -> None:
        """What was measured is where the folder is now, and what is being measured is rescued."""
        folder = Folder(path=tmp_path, command=command)
        (tmp_path / "hold").touch()
        process = folder.start("attention=naive,held", environment={"HOME": str(tmp_path / "no")})
        with no_process_left(process):
            wait_until_held(folder)
            folder.results.rename(tmp_path / "moved")
            (tmp_path / "hold").unlink()
            _, stderr = process.communicate(timeout=GUARD_S)
        assert process.returncode == 2
        (line,) = stderr.splitlines()
        assert str(folder.results) in line
        assert "No such file or directory" in line
        (kept,) = (tmp_path / "moved" / "records").glob("*.json")
        assert json.loads(kept.read_bytes())["status"] == "ok"
        # The line names the file, wherever that is.
        named = re.search(r"kept (?:as|in) (\S+?)[;,]?(?: |$)", line)
        assert named, line
        place = Path(named.group(1))
        files = [place] if place.is_file() else place.rglob("*held*.json")
        rescued = [json.loads(path.read_bytes()) for path in files]
        assert [record["status"] for record in rescued] == ["ok"]


@pytest.mark.parametrize(
    ("entry", "line"),
    [("attnbench", "attnbench: stopped"), ("status", "attnbench-status: stopped")],
)
def test_ctrl_c_while_a_command_loads_names_the_command(entry: str, line: str) -> None:
    code = f"""
import sys
from harness.commands import console
def stopped(command):
    raise KeyboardInterrupt
console._run = stopped
sys.exit(console.{entry}())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr.strip()) == (130, line)
