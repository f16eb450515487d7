"""Runs that the user stops, runs that share a results folder or a host, and disks that fill up.

Every test runs the real command on one CPU; see
:mod:`tests.support.fault_folders`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, Command
from fault_folders import (
    GUARD_S,
    STEP,
    Folder,
    descendants,
    is_alive,
    no_process_left,
    stops_cleanly,
    wait_until,
    wait_until_held,
    workers_of,
)


def stops_within(since: float) -> float:
    """Seconds that a command may take to stop: as many as it took to get to where it is.

    That included starting an interpreter and workers, and stopping does not.
    """
    return max(5.0, time.monotonic() - since)


class TestInterrupt:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_stops_and_goes_on_later(
        self, number: signal.Signals, tmp_path: Path, command: Command
    ) -> None:
        folder = Folder(path=tmp_path, command=command)
        (tmp_path / "hold").touch()
        process = folder.start("attention=naive,held")
        with no_process_left(process):
            wait_until_held(folder)
            stops_cleanly(folder, process, lambda: process.send_signal(number), 130)
        if number == signal.SIGTERM:
            return
        before = folder.files()
        (tmp_path / "hold").unlink()
        assert folder.run("attention=naive,held").returncode == 0
        after = folder.files()
        assert {name: after[name] for name in before} == before
        assert folder.records()["held"]["status"] == "ok"

    def test_while_workers_start_and_twice(self, tmp_path: Path, command: Command) -> None:
        """An impatient user presses Ctrl-C again."""
        folder = Folder(path=tmp_path, command=command, grids=[STEP])
        began = time.monotonic()
        process = folder.start("attention=naive", "parallel=ddp_torch")
        with no_process_left(process):
            wait_until(lambda: workers_of(process), "a worker starts")
            limit_s = stops_within(began)
            family = descendants(process.pid)
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            _, stderr = process.communicate(timeout=GUARD_S)
            assert time.monotonic() - started < limit_s
            assert "Traceback" not in stderr
            assert process.returncode == 130
            wait_until(lambda: not any(map(is_alive, family)), "all are gone")
        assert folder.files() == {}

    def test_orphaned_before_it_starts(self) -> None:
        """A worker whose parent was gone before it could ask to die with it."""
        gone = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpid())"],
            capture_output=True,
            text=True,
            check=True,
        )
        worker = subprocess.run(
            [
                sys.executable,
                "-m",
                "harness.run.workers.worker_main",
                "--events-fd=2",
                "--device=cpu",
            ],
            env=os.environ | {"ATTNBENCH_PARENT": gone.stdout.strip(), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=GUARD_S,
            stdin=subprocess.DEVNULL,
        )
        assert worker.returncode == 1
        assert worker.stderr == "the process that started this worker has ended\n"

    def test_workers_die_with_a_killed_parent(self, tmp_path: Path, command: Command) -> None:
        folder = Folder(path=tmp_path, command=command, grids=[STEP])
        (tmp_path / "hold").touch()
        process = folder.start("attention=naive,held", "parallel=ddp_torch")
        with no_process_left(process):
            wait_until_held(folder, 2)
            workers = workers_of(process)
            family = descendants(process.pid)
            assert len(workers) == 2
            assert len(family) >= 5, "two workers, their children, and the guard of the run"
            process.kill()
            try:
                wait_until(lambda: not any(map(is_alive, family)), "all end")
            finally:
                for child in filter(is_alive, family):
                    child.kill()
        assert folder.records()["naive"]["status"] == "ok"
        assert not list((folder.results / "records").glob("*.tmp"))


class TestTwoSweepsAtOnce:
    def test_every_case_is_measured_once(self, tmp_path: Path, command: Command) -> None:
        """Each is held in a case of its own until both have begun, then both go on.

        As on two hosts: with temporary folders of their own they do not take turns.
        """
        folder = Folder(path=tmp_path, command=command)
        lengths = [16, 18, 20, 22, 24, 26]
        arguments = ["attention=held", f"seq_len={','.join(map(str, lengths))}"]
        (tmp_path / "hold").touch()
        hosts = [tmp_path / "host0", tmp_path / "host1"]
        for host in hosts:
            host.mkdir()
        first, second = (
            folder.start(*arguments, environment={"TMPDIR": str(host)}) for host in hosts
        )
        with no_process_left(first), no_process_left(second):
            wait_until_held(folder, 2)
            (tmp_path / "hold").unlink()
            for process in (first, second):
                _, stderr = process.communicate(timeout=GUARD_S)
                assert (process.returncode, stderr) == (0, "")
        files = folder.files()
        records = [json.loads(content) for _, content in files.values()]
        assert sorted(record["case"]["seq_len"] for record in records) == lengths
        assert {record["status"] for record in records} == {"ok"}
        measured_by = {(seq_len, pid) for pid, seq_len in folder.calls()}
        assert Counter(seq_len for seq_len, _ in measured_by) == dict.fromkeys(lengths, 1)
        assert len({pid for _, pid in measured_by}) == 2

    def test_on_one_host_they_take_turns(self, tmp_path: Path, command: Command) -> None:
        """Whatever one case calls, it calls without another run's calls in between."""
        one, two = (Folder(path=tmp_path / name, command=command) for name in ("one", "two"))
        arguments = ["attention=witness", "seq_len=16,18,20,22", "task.measure_steps=40"]
        first = one.start(*arguments)
        second = two.start(*arguments, environment=one.environment())
        with no_process_left(first), no_process_left(second):
            for process in (first, second):
                process.communicate(timeout=GUARD_S)
                assert process.returncode == 0
        calls = one.calls()
        stretches = [
            call for call, before in zip(calls, [None, *calls], strict=False) if call != before
        ]
        assert len(stretches) == len(set(stretches)) == 8


class TestWorkers:
    def test_isolate_gives_each_case_a_process(self, tmp_path: Path, command: Command) -> None:
        folder = Folder(path=tmp_path, command=command)
        done = folder.run("attention=witness", "seq_len=16,18", "isolate=true")
        assert done.returncode == 0
        pids = {seq_len: {pid for pid, s in folder.calls() if s == seq_len} for seq_len in (16, 18)}
        assert [len(pids[seq_len]) for seq_len in (16, 18)] == [1, 1]
        assert pids[16] != pids[18]

    @pytest.mark.parametrize(("fresh", "number"), [("auto", 3), ("false", 1)])
    def test_interleaved(self, fresh: str, number: int, tmp_path: Path, command: Command) -> None:
        """Two backends in three rounds of 2, 2 and 1 passes, in a process for each or for all."""
        folder = Folder(path=tmp_path, command=command, grids=[STEP])
        done = folder.run(
            *("attention=held,witness", "interleave=3", f"fresh_rounds={fresh}"),
            *("task.measure_steps=5", "task.warmup_steps=0"),
        )
        assert done.returncode == 0
        records = folder.records()
        assert list(records) == ["held", "witness"]
        for record in records.values():
            assert record["status"] == "ok"
            assert record["rounds"] == [2, 2, 1]
            assert record["notes"]["interleaved_rounds"] == 3
            for phase in record["phases"].values():
                assert [len(samples) for samples in phase["samples_ms"]] == [5]
        # Each of both backends: three calls of the check, in the first round, and 5 passes.
        assert len(folder.calls()) == 2 * (3 + 5)
        assert len({pid for pid, _ in folder.calls()}) == number

    def test_warm_worker_serves_all_cases(self, tmp_path: Path, command: Command) -> None:
        """And without warm-up."""
        folder = Folder(path=tmp_path, command=command)
        done = folder.run("attention=witness", "seq_len=4,8", "task.warmup_steps=0")
        assert done.returncode == 0
        assert len({pid for pid, _ in folder.calls()}) == 1
        for _, content in folder.files().values():
            record = json.loads(content)
            assert set(record["phases"]) == {"forward", "backward", "forward_backward"}
            assert record["compilation"]["recompilations"] == 0


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Path:
    """Where one case is recorded; to be copied, not changed."""
    folder = Folder(path=tmp_path_factory.mktemp("measured"), command=command)
    assert folder.run("attention=naive").returncode == 0
    return folder.path


@pytest.fixture
def measured(measured_once: Path, tmp_path: Path, command: Command) -> Folder:
    shutil.copytree(measured_once, tmp_path, dirs_exist_ok=True)
    return Folder(path=tmp_path, command=command)


class TestDisk:
    def test_a_record_cut_short_is_named_and_measured_again(self, measured: Folder) -> None:
        folder = measured
        (path,) = (folder.results / "records").glob("*.json")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        before = folder.files()

        again = folder.run("attention=naive")
        assert again.returncode == 0
        (line,) = again.stderr.splitlines()
        assert str(path) in line
        assert "measured again" in line
        after = folder.files()
        assert after[path.name] == before[path.name]
        assert set(after) - set(before) == {f"{path.stem}.2.json"}
        assert json.loads(after[f"{path.stem}.2.json"][1])["status"] == "ok"

        once_more = folder.run("attention=naive")
        assert once_more.returncode == 0
        assert folder.files() == after

    @pytest.mark.parametrize("place", ["", "inside/it"])
    def test_results_folder_that_cannot_be(
        self, place: str, tmp_path: Path, command: Command
    ) -> None:
        (tmp_path / "file").write_text("a file, not a folder", encoding="utf-8")
        results = tmp_path / "file" / place
        done = command(f"results={results}", "device=cpu", "model=tiny")
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"attnbench: results={results}: ")
        assert done.stdout == ""

    def test_a_disk_that_fills_up(self, measured: Folder) -> None:
        """A limit on the size of files stands in for a full disk: the record does not fit."""
        folder = measured
        before = folder.files()
        limit = 2500
        assert limit < min(len(content) for _, content in before.values())

        def limit_files() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        process = folder.start("attention=naive,witness", preexec_fn=limit_files)
        with no_process_left(process):
            _, stderr = process.communicate(timeout=GUARD_S)
        assert process.returncode == 2
        (line,) = stderr.splitlines()
        assert str(folder.results / "records") in line
        assert "witness" in line
        assert "File too large" in line
        assert folder.files() == before
        assert not list((folder.results / "records").glob("*.tmp"))
