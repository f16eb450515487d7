"""Workers that die, lie, print or leave something behind, and the cases that are not to blame.

The runner, its groups and its pipes are the real ones; the workers follow a script
(:mod:`tests.support.scripted_worker`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import scripted_worker
from agents import KEY, free_port
from conftest import ROOT
from fault_folders import is_alive, wait_until

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.run.children import deadline, events, worker_log
from harness.run.children import rank as rank_module
from harness.run.nodes.agent import serve_agent
from harness.run.nodes.hosts import Hosts
from harness.run.rounds.options import RunOptions
from harness.run.runner import Runner
from harness.run.workers import job_watch, worker_group
from harness.run.workers.worker_group import WorkerStartError
from harness.store.record import Record, RecordStore

LONG_S = 600.0
"""The usual time limit of a case; nothing here may wait for it."""


@dataclass
class Listener:
    """A progress that waits for a worker to be stopped, or does what a test says."""

    at_stage: Any = None
    stages: list[str] = field(default_factory=list)

    def started(self, case: Case) -> None: ...

    def stage(self, name: str) -> None:
        self.stages.append(name)
        if self.at_stage is not None:
            self.at_stage(name)

    def finished(self, record: Record, *, measured_now: bool) -> None: ...


@dataclass
class Sweep:
    """A results folder, and a sweep over sequence lengths that scripted workers measure."""

    path: Path

    def run(
        self,
        script: dict[str, list[str]],
        *,
        lengths: tuple[int, ...] = (16, 32),
        ranks: int = 1,
        timeout_s: float = LONG_S,
        progress: Listener | None = None,
        hosts: Hosts | None = None,
    ) -> dict[int, Record]:
        (self.path / "script.json").write_text(json.dumps(script))
        store = RecordStore(self.path / "results")
        store.create()
        words = ["model=tiny", "attention=naive", "device=cpu"]
        words += [f"seq_len={','.join(map(str, lengths))}", f"results={self.path / 'results'}"]
        words += ["parallel=ddp_torch", f"parallel.dp={ranks}"] if ranks > 1 else []
        options = RunOptions(results=self.path / "results", timeout_s=timeout_s)
        began = time.perf_counter()
        Runner(options, store, progress or Listener(), hosts).run(compose_request(words).cases)
        assert time.perf_counter() - began < LONG_S / 2
        return self.records()

    def records(self) -> dict[int, Record]:
        found, problems = RecordStore(self.path / "results").load()
        assert problems == []
        return {record.case["seq_len"]: record for record in found.values()}

    def asked(self, key: str, rank: int = 0) -> list[int]:
        """The processes that were asked for it."""
        return list(map(int, (self.path / f"asked-{key}-{rank}").read_text().split()))

    def process(self, name: str) -> psutil.Process | None:
        """The process that a worker has noted, if it still exists."""
        wait_until((self.path / name).exists, f"a worker notes {name}")
        try:
            return psutil.Process(int((self.path / name).read_text()))
        except psutil.NoSuchProcess:
            return None

    def is_gone(self, name: str) -> bool:
        process = self.process(name)
        return process is None or not is_alive(process)

    def logs(self) -> list[Path]:
        found = (self.path / "results" / "logs").glob("worker-*.log")
        return sorted(found, key=lambda path: (len(path.name), path.name))


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    monkeypatch.setattr(rank_module, "ENTRY", "tests.support.scripted_worker")
    monkeypatch.setattr(worker_group, "GRACE_S", 0.2)
    monkeypatch.setenv(scripted_worker.FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield Sweep(tmp_path)
    for name in ("child", "daemon", "stopped"):
        if (tmp_path / name).exists():
            pid = int((tmp_path / name).read_text())
            # Whatever the test finds, nothing that it started outlives it.
            if psutil.pid_exists(pid) and "python" in psutil.Process(pid).name():
                os.kill(pid, signal.SIGKILL)


def statuses(records: dict[int, Record]) -> list[str]:
    return [records[length].status for length in sorted(records)]


def message(record: Record) -> str:
    assert record.error is not None
    assert "\n" not in record.error["message"]
    return str(record.error["message"])


class TestInnocentCases:
    """Item 3: what happened before a case's first stage is not that case's fault."""

    def test_a_worker_that_dies_between_two_cases(
        self, sweep: Sweep, capsys: pytest.CaptureFixture[str]
    ) -> None:
        records = sweep.run({"16": ["late_die"]}, lengths=(16, 32, 48))
        assert statuses(records) == ["ok", "ok", "ok"]
        said = capsys.readouterr().err
        assert "the worker was killed by signal 9" in said
        assert "before the case began" in said
        assert str(sweep.logs()[0]) in said

    def test_on_one_of_two_ranks(self, sweep: Sweep) -> None:
        records = sweep.run(
            {"32/0": ["hang", "go_well"], "32/1": ["unread_die_after_rank_0", "go_well"]}, ranks=2
        )
        assert statuses(records) == ["ok", "ok"]
        assert len(set(sweep.asked("32", rank=0))) == 2

    def test_on_another_host(self, sweep: Sweep) -> None:
        """The second rank's worker is an agent's."""
        script = {"32/0": ["hang", "go_well"], "32/1": ["unread_die_after_rank_0", "go_well"]}
        address: dict[str, Any] = {"address": "127.0.0.1", "port": free_port(), "key": KEY}
        logs = sweep.path / "logs of the other host"
        logs.mkdir()
        with ThreadPoolExecutor() as pool:
            served = pool.submit(serve_agent, **address, rank=1, run="run", logs=logs)
            gathered = Hosts.gathered(
                **address, world_size=2, local_ranks=1, ranks_per_node=1, run="run"
            )
            with gathered as hosts:
                records = sweep.run(script, ranks=2, hosts=hosts)
            assert served.result() == 2
        assert statuses(records) == ["ok", "ok"]
        assert len(set(sweep.asked("32", rank=0))) == 2
        assert len(list(logs.iterdir())) == 2

    def test_a_worker_that_got_the_job_and_did_not_read_it(self, sweep: Sweep) -> None:
        assert statuses(sweep.run({"32": ["unread_die", "go_well"]})) == ["ok", "ok"]

    def test_what_the_last_case_left_breaks_the_worker(self, sweep: Sweep) -> None:
        """Before the first stage a warm worker tidies up; a new one has only the case itself."""
        records = sweep.run({"32": ["early_die", "go_well"], "48": ["early_die"]}, lengths=(32, 48))
        assert statuses(records) == ["failed", "failed"]
        records = sweep.run({"64": ["go_well"], "80": ["early_die", "go_well"]}, lengths=(64, 80))
        assert (records[64].status, records[80].status) == ("ok", "ok")
        assert "while start" in message(records[48])

    def test_a_worker_that_is_stopped_while_idle(self, sweep: Sweep) -> None:
        records = sweep.run({"16": ["late_stop"]}, timeout_s=1.0)
        assert statuses(records) == ["ok", "ok"]

    def test_not_for_ever(self, sweep: Sweep) -> None:
        with pytest.raises(WorkerStartError) as caught:
            sweep.run({"32": ["unread_die"]})
        assert "before the case began, 3 times in a row" in str(caught.value)
        assert str(sweep.logs()[-1]) in str(caught.value)
        assert statuses(sweep.records()) == ["ok"]
        assert len(set(sweep.asked("32"))) == 3

    def test_a_case_that_kills_its_worker_is_to_blame(self, sweep: Sweep) -> None:
        records = sweep.run({"16": ["die"]})
        assert statuses(records) == ["failed", "ok"]
        assert message(records[16]).endswith("while measuring")
        assert len(sweep.asked("16")) == 1


class TestTimeLimits:
    """Item 4: a result that is there counts, and nobody's time is nobody's."""

    def test_a_result_that_came_while_the_parent_was_stopped(
        self, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a clock that jumps ahead an hour once the worker measures, as after Ctrl-Z and fg."""
        ahead_s = [0.0]
        clock = time.monotonic

        def stop(stage: str) -> None:
            ahead_s[0] += 3600.0

        monkeypatch.setattr(deadline.time, "monotonic", lambda: clock() + ahead_s[0])
        script = {"16": ["take_its_time"], "32": ["take_its_time"]}
        records = sweep.run(script, progress=Listener(at_stage=stop))
        assert statuses(records) == ["ok", "ok"]

    def test_a_result_that_is_there_counts_although_the_time_is_up(
        self, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where none of the time is given back."""
        monkeypatch.setattr(deadline, "STOPPED_S", 1e9)
        ahead_s = [0.0]
        clock = time.monotonic

        def wait_for_the_answer(stage: str) -> None:
            if stage.endswith("measuring"):
                (sweep.path / "told").touch()
                wait_until((sweep.path / "answered").exists, "the worker answers")
                ahead_s[0] = 3600.0

        monkeypatch.setattr(deadline.time, "monotonic", lambda: clock() + ahead_s[0])
        listener = Listener(at_stage=wait_for_the_answer)
        records = sweep.run({"16": ["answer_when_told"]}, lengths=(16,), progress=listener)
        assert statuses(records) == ["ok"]

    def test_a_parent_that_is_really_stopped(self, sweep: Sweep) -> None:
        """It stops itself as Ctrl-Z does, and a helper that shares nothing lets it go on later."""
        script = {"16": ["take_its_time"]}
        pid = os.fork()
        if pid == 0:
            code = 1
            try:

                def stop(stage: str) -> None:
                    os.kill(os.getpid(), signal.SIGSTOP)

                records = sweep.run(
                    script, lengths=(16,), timeout_s=2.5, progress=Listener(at_stage=stop)
                )
                code = 0 if statuses(records) == ["ok"] else 2
            finally:
                os._exit(code)
        while True:
            _, status = os.waitpid(pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            if os.WSTOPSIG(status) == signal.SIGSTOP:
                # Longer than the limit, which is what the test is about.
                time.sleep(1.6)
                os.kill(pid, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(status) == 0

    def test_a_stopped_worker_has_no_more_time(self, sweep: Sweep) -> None:
        records = sweep.run({"16": ["stop"]}, timeout_s=1.0)
        assert statuses(records) == ["timeout", "ok"]
        assert message(records[16]) == "exceeded timeout_s=1 (while measuring)"
        assert sweep.is_gone("stopped")

    def test_a_worker_that_is_stopped_as_it_starts(
        self, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_group, "START_TIMEOUT_S", 0.7)
        with pytest.raises(WorkerStartError, match=r"took over 1 s to start; its log is .*\.log"):
            sweep.run({"start": ["stop"]})
        assert sweep.is_gone("stopped")

    def test_a_gap_between_two_looks_is_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [100.0]
        monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
        limit = deadline.Deadline(10.0)
        now[0] += 1.0
        assert limit.left_s() == 9.0
        now[0] += 1000.0
        assert limit.left_s() == 9.0 - deadline.POLL_S
        now[0] += 1.5
        assert limit.left_s() == pytest.approx(7.0)


class TestDeaths:
    """Item 5: the end of a worker is the end of its process, whoever holds its pipes."""

    @pytest.mark.parametrize("act", ["die_and_leave_the_pipe", "fork_and_die"])
    def test_a_child_that_holds_the_pipe(self, sweep: Sweep, act: str) -> None:
        records = sweep.run({"16": [act]})
        assert statuses(records) == ["failed", "ok"]
        assert "killed by signal 9" in message(records[16])
        assert "of the child" not in message(records[16])
        assert sweep.is_gone("child")

    @pytest.mark.parametrize(
        ("act", "words"),
        [
            ("exit", "the worker exited with code 0 while measuring"),
            ("raise_exit", "the worker exited with code 3 while measuring"),
        ],
    )
    def test_a_case_that_ends_its_process(self, sweep: Sweep, act: str, words: str) -> None:
        records = sweep.run({"16": [act]})
        assert (statuses(records), message(records[16])) == (["failed", "ok"], words)

    def test_a_worker_that_closes_its_pipe_and_runs_on(
        self, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_watch, "LAST_S", 0.2)
        records = sweep.run({"16": ["close"]})
        assert statuses(records) == ["failed", "ok"]
        assert message(records[16]) == "the worker closed its connection while measuring"

    def test_a_job_that_no_pipe_holds_and_nobody_reads(
        self, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The parent neither blocks on it nor loses its clock."""
        case = compose_request(["model=tiny", "attention=naive", "device=cpu"]).cases[0]
        values = case.to_dict() | {"padding": "x" * 900_000}
        monkeypatch.setattr(Case, "to_dict", lambda case: values | {"seq_len": case.seq_len})
        records = sweep.run({"16": ["late_stop"]}, timeout_s=1.0)
        assert statuses(records) == ["ok", "ok"]


class TestJunk:
    """Item 22: what is no event is the fault of the case that wrote it, and of no other."""

    @pytest.mark.parametrize(
        ("act", "words"),
        [
            ("junk", r"wrote '\x00\xff not an event' to the pipe of its events"),
            ("junk_line", "wrote 'hello' to the pipe"),
            ("much_junk", "wrote 'jjjj"),
            ("long_event", "wrote an event of over 32 MiB"),
            ("deep", "wrote a broken event"),
            ("typed_wrong", "wrote an event of another form"),
            ("no_outcome", "wrote a result without one outcome for each rank"),
            ("ready_again", "wrote an event out of turn"),
            ("answer_for_another", "wrote of a job that it was not given"),
            ("escape", "wrote an event of another form (a stage with control characters)"),
        ],
    )
    def test_it_fails_the_case_and_the_sweep_goes_on(
        self, sweep: Sweep, act: str, words: str
    ) -> None:
        records = sweep.run({"16": [act]})
        assert statuses(records) == ["failed", "ok"]
        assert message(records[16]).startswith(f"the worker {words}")
        assert message(records[16]).endswith(" while measuring")
        assert len(message(records[16])) < 400

    @pytest.mark.parametrize("act", ["late_junk", "late_die", "late_exit", "late_close"])
    def test_after_the_result_it_harms_no_other_case(
        self, sweep: Sweep, act: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if it comes in one read with the result."""
        monkeypatch.setattr(job_watch, "LAST_S", 0.2)
        assert statuses(sweep.run({"16": [act]})) == ["ok", "ok"]

    def test_a_second_answer_is_not_the_next_cases(self, sweep: Sweep) -> None:
        records = sweep.run({"16": ["answer_twice"], "32": ["die"]})
        assert statuses(records) == ["ok", "failed"]

    def test_a_flood_of_stages(self, sweep: Sweep) -> None:
        listener = Listener()
        assert statuses(sweep.run({"16": ["flood"]}, progress=listener)) == ["ok", "ok"]
        assert len(listener.stages) > 100_000

    def test_long_lines_take_linear_time(self) -> None:
        reader = events.EventReader()
        line = b'{"event": "ready", "environment": {"x": "' + b"y" * (20 << 20) + b'"}}\n'
        began = time.process_time()
        pieces = (line[start : start + 65536] for start in range(0, len(line), 65536))
        found = [event for piece in pieces for event in reader.take(piece)]
        assert len(found) == 1
        # Copying all that has come with every piece takes 3 GB of copies, a second or more.
        assert time.process_time() - began < 1.0


def printed_bytes(log: str) -> int:
    """Bytes that went into a log that lost its middle; more may have come since it was cut."""
    head, _, rest = log.partition("\n[attnbench cut ")
    cut, _, tail = rest.partition(" bytes here: ")
    return len(head) + int(cut) + len(tail.partition("]\n")[2])


class TestLogs:
    """Items 13 and 14: logs of limited size, each worker's its own, and not without end."""

    def test_what_is_too_long_loses_its_middle(self, sweep: Sweep) -> None:
        records = sweep.run({"16": ["print_much", "go_well"], "32": ["die"]})
        assert statuses(records) == ["ok", "failed"]
        log = sweep.logs()[0]
        assert log.stat().st_size <= worker_log.MAX_BYTES
        text = log.read_text()
        assert text.startswith("the first line\n")
        assert text.endswith("the last line\n")
        printed = 64 * (2**20 + 1) + len("the first line\nthe last line\n")
        assert printed_bytes(text) == printed
        assert "the last line" in (records[32].error or {})["log"]
        assert len((records[32].error or {})["log"]) < 25_000

    def test_cut_again_and_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("MAX_BYTES", 1000), ("HEAD_BYTES", 100), ("TAIL_BYTES", 300)):
            monkeypatch.setattr(worker_log, name, value)
        log = worker_log.WorkerLog(tmp_path, "worker-1")
        total = 0
        for number in range(200):
            total += os.write(log.fd, f"line {number}\n".encode() * 20)
            log.trim()
        text = log.path.read_text()
        assert len(text) <= 1000
        assert text.count("[attnbench cut") == 1
        assert printed_bytes(text) == total
        assert log.lines(1) == ["line 199"]
        log.close()

    def test_a_gigabyte_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        log = worker_log.WorkerLog(tmp_path, "worker-1")
        os.ftruncate(log.fd, 2**30)
        os.write(log.fd, b"\nthe end\n" + b"z" * 5000 + b"\n")
        asked_bytes: list[int] = []
        pread = os.pread

        def watched(fd: int, number: int, start: int) -> bytes:
            asked_bytes.append(number)
            return pread(fd, number, start)

        monkeypatch.setattr(os, "pread", watched)
        lines = log.lines(20)
        log.trim()
        assert len(asked_bytes) == 2
        assert max(asked_bytes) <= worker_log.TAIL_BYTES
        assert lines[-2] == "the end"
        assert lines[-1].endswith("z ... (4000 characters more)")
        assert log.path.stat().st_size < worker_log.MAX_BYTES
        log.close()

    def test_a_replacement_has_a_log_of_its_own(self, sweep: Sweep) -> None:
        records = sweep.run({"16": ["die"], "32": ["die"]}, lengths=(16, 32, 48))
        assert statuses(records) == ["failed", "failed", "ok"]
        assert len(sweep.logs()) == 3

    def test_old_ones_go_and_living_ones_stay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_log, "KEPT_LOGS", 4)
        living = worker_log.WorkerLog(tmp_path, "worker-0")
        for number in range(1, 8):
            log = worker_log.WorkerLog(tmp_path, f"worker-{number}")
            os.write(log.fd, b"something\n" if number < 6 else b"")
            os.utime(log.fd, (number, number))
            log.close()
        os.utime(living.path, (0, 0))
        (tmp_path / "worker-link.log").symlink_to(living.path)
        (tmp_path / "worker-fifo.log").unlink(missing_ok=True)
        os.mkfifo(tmp_path / "worker-fifo.log")
        worker_log.prune(tmp_path)
        left = {path.name for path in tmp_path.iterdir()}
        assert "worker-0.log" in left
        assert not {"worker-6.log", "worker-7.log"} & left
        assert "worker-5.log" in left
        living.close()

    def test_a_planted_name_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "target").write_text("precious")
        (tmp_path / "worker-1.log").symlink_to(tmp_path / "target")
        log = worker_log.WorkerLog(tmp_path, "worker-1")
        os.write(log.fd, b"x")
        log.close()
        assert log.path.name == "worker-1.2.log"
        assert (tmp_path / "target").read_text() == "precious"


class TestFamilies:
    """Item 15: what a case has started ends with its worker."""

    @pytest.mark.parametrize(
        "act", ["daemon", "daemon_then_die", "daemon_then_hang", "daemon_without_environment"]
    )
    def test_a_daemon_ends_with_the_group(self, sweep: Sweep, act: str) -> None:
        timeout_s = 1.5 if act.endswith("hang") else LONG_S
        sweep.run({"16": [act]}, timeout_s=timeout_s)
        assert sweep.is_gone("daemon")

    def test_no_zombie_is_left(self, sweep: Sweep) -> None:
        sweep.run({"16": ["daemon_then_die"], "32": ["fork_and_die"]})
        children = psutil.Process().children()
        zombies = [child for child in children if child.status() == psutil.STATUS_ZOMBIE]
        noted = {int((sweep.path / name).read_text()) for name in ("daemon", "child")}
        assert not noted & {zombie.pid for zombie in zombies}


class TestCleanStart:
    def test_a_case_finds_the_process_as_it_was(self, sweep: Sweep) -> None:
        """Folder, output, handlers, timers; the input of all cases is empty."""
        records = sweep.run({"16": ["spoil"], "32": ["tell"]})
        assert statuses(records) == ["ok", "ok"]
        assert len({*sweep.asked("16"), *sweep.asked("32")}) == 1, "one process for both"
        found = json.loads((sweep.path / "process.json").read_text())
        (log,) = sweep.logs()
        assert found == {
            "folder": os.getcwd(),
            "stdout": str(log),
            "alarm": str(signal.SIG_DFL),
            "blocked": 0,
            "timer": 0.0,
            "input": "",
        }
        assert "printed" in log.read_text()
        assert threading.active_count() < 50
