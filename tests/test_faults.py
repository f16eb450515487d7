"""What the harness does when a case, a rank, a worker, the user or the disk gives up.

Every test runs the real command on one CPU, with transformers of a few thousand parameters
and the misbehaving backends of :mod:`tests.faults`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Command
from torch import multiprocessing

SWEEP = """
title: Faults
tables: [summary]
scales:
  tiny:
    - task: train_step
      model: tiny
      model.d_model: 16
      model.d_ff: 16
      model.num_layers: 1
      model.num_heads: 2
      model.vocab_size: 16
      seq_len: 16
      batch_size: 1
      task.warmup_steps: 1
      task.measure_steps: 2
"""

STOP_WITHIN_S = 5.0


@dataclass(kw_only=True, slots=True)
class Folder:
    """One results folder, and the folder through which backends talk to a test."""

    path: Path
    command: Command

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "faults.yaml").write_text(SWEEP, encoding="utf-8")

    @property
    def results(self) -> Path:
        return self.path / "results"

    def arguments(self, *overrides: str) -> list[str]:
        sweep = f"sweeps={self.path / 'faults.yaml'}"
        return [sweep, f"results={self.results}", "device=cpu", *overrides]

    def environment(self) -> dict[str, str]:
        # A temporary folder of its own, so that no other run on this host has to be waited for.
        temporary = self.path / "tmp"
        temporary.mkdir(exist_ok=True)
        return {
            "ATTNBENCH_PLUGINS": "tests.faults",
            "ATTNBENCH_TEST_FOLDER": str(self.path),
            "TMPDIR": str(temporary),
        }

    def run(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        return self.command(*self.arguments(*overrides), environment=self.environment())

    def start(
        self, *overrides: str, environment: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start the command without waiting, as a terminal would: in a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "harness", *self.arguments(*overrides)],
            cwd=ROOT,
            env={**os.environ, **self.environment(), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Every record file: when it was written, and what it holds."""
        return {
            path.name: (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted((self.results / "records").glob("*.json"))
        }

    def records(self) -> dict[str, dict[str, Any]]:
        """The first record of each backend."""
        records = [json.loads(content) for _, content in self.files().values()]
        firsts = [record for record in records if record["attempt"] == 1]
        found = {record["case"]["attention"]["name"]: record for record in firsts}
        assert len(found) == len(firsts), "a backend has several cases"
        return found

    def calls(self) -> list[tuple[int, int]]:
        """Process and sequence length of every call of a witness, in order."""
        lines = (self.path / "calls").read_text(encoding="utf-8").splitlines()
        pairs = [line.split() for line in lines]
        return [(int(pid), int(seq_len)) for pid, seq_len in pairs]

    def table(self) -> dict[str, list[str]]:
        """Cells of the summary table by backend."""
        (path,) = self.results.glob("sweeps/*/tables/summary.md")
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.startswith("|")
        ]
        return {row[0].strip("`").replace("\\", ""): row[1:] for row in rows}


@contextmanager
def no_process_left(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever the test finds, nothing that it started outlives it."""
    try:
        yield
    finally:
        family = [process.pid, *(child.pid for child in descendants(process.pid))]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Those that have got as far as being workers."""
    found = []
    for child in descendants(process.pid):
        with suppress(psutil.Error):
            if "harness.worker_process" in child.cmdline():
                found.append(child)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Any, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


# One rank ---------------------------------------------------------------------------------

SINGLE = {
    "fault_raise": "failed",
    "fault_raise_late": "failed",
    "fault_oom": "oom",
    "fault_oom_host": "oom",
    "fault_sigkill": "failed",
    "fault_segfault": "failed",
    "fault_exit": "failed",
    "fault_hang": "timeout",
    "fault_wrong": "wrong",
    "fault_nan": "wrong",
    "fault_unsupported": "unsupported",
    "naive": "ok",
}


@dataclass(kw_only=True, slots=True)
class Ended:
    """A folder and the command that ran there."""

    folder: Folder
    done: subprocess.CompletedProcess[str]
    records: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Ended:
    folder = Folder(path=tmp_path_factory.mktemp("single"), command=command)
    done = folder.run(f"attention={','.join(SINGLE)}", "timeout_s=4")
    return Ended(folder=folder, done=done, records=folder.records())


class TestOneRank:
    def test_every_fault_becomes_a_record_and_the_sweep_goes_on(self, single: Ended) -> None:
        assert {name: record["status"] for name, record in single.records.items()} == SINGLE

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fault_raise", "ValueError: this backend always raises"),
            ("fault_oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 PiB."),
            ("fault_unsupported", "the test says so"),
            ("fault_exit", "the worker exited with code 7 while checking"),
            ("fault_hang", "exceeded timeout_s=4 (while checking)"),
        ],
    )
    def test_messages(self, single: Ended, name: str, message: str) -> None:
        assert single.records[name]["error"]["message"] == message

    @pytest.mark.parametrize(
        ("name", "number", "signal_name"),
        [("fault_sigkill", 9, "SIGKILL"), ("fault_segfault", 11, "SIGSEGV")],
    )
    def test_a_signal_is_named(
        self, single: Ended, name: str, number: int, signal_name: str
    ) -> None:
        message = single.records[name]["error"]["message"]
        assert f"killed by signal {number} ({signal_name}" in message
        assert message.endswith("while checking")

    def test_a_segfault_keeps_the_stack_that_the_worker_printed(self, single: Ended) -> None:
        assert "in _segfault" in single.records["fault_segfault"]["error"]["log"]

    def test_an_error_says_where(self, single: Ended) -> None:
        early = single.records["fault_raise"]["error"]
        late = single.records["fault_raise_late"]["error"]
        assert (early["stage"], early["rank"]) == ("checking", 0)
        assert (late["stage"], late["rank"]) == ("warm-up", 0)
        assert "and says more on a second line" in early["traceback"]

    def test_host_memory_is_memory_too(self, single: Ended) -> None:
        assert "can't allocate memory" in single.records["fault_oom_host"]["error"]["message"]

    @pytest.mark.parametrize("name", ["fault_wrong", "fault_nan"])
    def test_a_wrong_result_has_no_times(self, single: Ended, name: str) -> None:
        record = single.records[name]
        assert record["phases"] == {}
        assert "against float64" in record["error"]["message"]

    def test_wrong_by_how_much(self, single: Ended) -> None:
        errors = single.records["fault_wrong"]["check"]["errors"]
        assert errors["o"] == pytest.approx(0.01, rel=1e-3)
        assert errors["o"] > single.records["fault_wrong"]["check"]["tolerance"]

    def test_a_hang_ends_at_its_limit(self, single: Ended) -> None:
        assert 4 <= single.records["fault_hang"]["wall_s"] < 6

    def test_cells_of_the_table(self, single: Ended) -> None:
        table = single.folder.table()
        words = {
            "failed": "failed",
            "oom": "OOM",
            "timeout": "timeout",
            "wrong": "wrong result",
            "unsupported": "unsupported",
        }
        for name, status in SINGLE.items():
            if status == "ok":
                assert float(table[name][0]) > 0
            else:
                assert table[name][0] == words[status]
                assert set(table[name][1:]) <= {words[status], "–"}  # noqa: RUF001

    def test_exit_code_and_summary(self, single: Ended) -> None:
        """Out of memory and unsupported are results; the other eight are failures."""
        assert single.done.returncode == 1
        assert "12 cases: 5 failed, 2 oom, 1 timeout, 2 wrong, 1 unsupported, 1 ok" in (
            " ".join(single.done.stdout.split())
        )
        assert single.done.stderr.splitlines() == [
            "attnbench: 8 of 12 cases failed; the report says why, retry=true measures them again"
        ]

    def test_the_report_tells_every_reason(self, single: Ended) -> None:
        (report,) = single.folder.results.glob("sweeps/*/report.md")
        text = report.read_text(encoding="utf-8")
        for words in ("always raises", "killed by signal 9", "the test says so", "timeout_s=4"):
            assert words in text

    def test_a_second_run_measures_nothing(self, single: Ended) -> None:
        before = single.folder.files()
        again = single.folder.run(f"attention={','.join(SINGLE)}", "timeout_s=4")
        assert single.folder.files() == before
        assert again.returncode == 1
        assert "12 of them recorded already" in again.stdout
        assert again.stderr == single.done.stderr


class TestRetry:
    def test_only_failed_cases_as_new_files(self, tmp_path: Path, command: Command) -> None:
        folder = Folder(path=tmp_path, command=command)
        attention = "attention=fault_flaky,fault_oom,fault_unsupported,fault_wrong,naive"
        (tmp_path / "broken").touch()
        assert folder.run(attention).returncode == 1
        before = folder.files()
        assert len(before) == 5

        (tmp_path / "broken").unlink()
        again = folder.run(attention, "retry=true")
        after = folder.files()
        assert {name: after[name] for name in before} == before
        second = {name: json.loads(after[name][1]) for name in after if name not in before}
        by_backend = {item["case"]["attention"]["name"]: item for item in second.values()}
        assert {name: item["status"] for name, item in by_backend.items()} == {
            "fault_flaky": "ok",
            "fault_wrong": "wrong",
        }
        assert all(item["attempt"] == 2 for item in second.values())
        assert all(name.endswith(".2.json") for name in second)
        assert again.returncode == 1
        # The newest attempt counts.
        assert float(folder.table()["fault_flaky"][0]) > 0


# Two ranks --------------------------------------------------------------------------------

TWO_RANKS = {
    "fault_raise_rank1": "failed",
    "fault_raise_rank1_late": "failed",
    "fault_oom_rank1": "oom",
    "fault_oom_rank1_late": "oom",
    "fault_sigkill_rank1": "failed",
    "fault_sigkill_rank1_late": "failed",
    "fault_hang_rank1": "failed",
    "fault_hang_rank1_late": "timeout",
    "naive": "ok",
}


@pytest.fixture(scope="module", params=["ddp_bucketed"])
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, command: Command
) -> Ended:
    folder = Folder(path=tmp_path_factory.mktemp("two"), command=command)
    done = folder.run(
        f"attention={','.join(TWO_RANKS)}",
        f"parallel={request.param}",
        "timeout_s=6",
        "launcher.vote_timeout_s=2",
    )
    return Ended(folder=folder, done=done, records=folder.records())


class TestTwoRanks:
    def test_every_fault_becomes_a_record_and_the_sweep_goes_on(self, two_ranks: Ended) -> None:
        statuses = {name: record["status"] for name, record in two_ranks.records.items()}
        assert statuses == TWO_RANKS
        assert two_ranks.done.returncode == 1

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fault_raise_rank1", "rank 1: ValueError: this backend always raises"),
            # While the other rank waits in an all-reduce, and then sees its peer disappear.
            ("fault_raise_rank1_late", "rank 1: ValueError: this backend always raises"),
            ("fault_oom_rank1", "rank 1: OutOfMemoryError: CUDA out of memory."),
            ("fault_oom_rank1_late", "rank 1: OutOfMemoryError: CUDA out of memory."),
            ("fault_sigkill_rank1", "rank 1 was killed by signal 9 (SIGKILL"),
            ("fault_sigkill_rank1_late", "rank 1 was killed by signal 9 (SIGKILL"),
            ("fault_hang_rank1", "no answer to the other ranks' vote from rank 1 (in checking)"),
            (
                "fault_hang_rank1_late",
                "exceeded timeout_s=6 (rank 0 in warm-up, rank 1 in warm-up)",
            ),
        ],
    )
    def test_the_guilty_rank_is_named(self, two_ranks: Ended, name: str, message: str) -> None:
        assert two_ranks.records[name]["error"]["message"].startswith(message)

    def test_a_vote_ends_a_case_within_seconds(self, two_ranks: Ended) -> None:
        """Everybody at the vote: at once. One rank stuck: the vote's timeout and some grace."""
        assert two_ranks.records["fault_raise_rank1"]["wall_s"] < 2
        assert two_ranks.records["fault_hang_rank1"]["wall_s"] < 2 + 5

    def test_samples_of_both_ranks(self, two_ranks: Ended) -> None:
        record = two_ranks.records["naive"]
        for phase in ("forward", "backward", "optimizer", "step"):
            samples = record["phases"][phase]["samples_ms"]
            assert [len(rank) for rank in samples] == [2, 2]
            assert samples[0] != samples[1]
            assert all(sample > 0 for rank in samples for sample in rank)
        assert len(record["memory"]) == 2
        assert record["case"]["parallel"]["dp"] == 2

    def test_the_loss_is_that_of_an_untrained_model(self, two_ranks: Ended) -> None:
        """About log of the vocabulary's 16 entries."""
        assert two_ranks.records["naive"]["notes"]["loss"] == pytest.approx(2.77, abs=1)

    def test_a_rank_that_fails_in_a_step_meets_the_others_at_the_next(
        self, tmp_path: Path, command: Command
    ) -> None:
        """Without a collective in the step, the healthy rank is in the next step's barrier."""
        folder = Folder(path=tmp_path, command=command)
        done = folder.run(
            "attention=fault_raise_rank1_late,naive",
            "task.mode=forward",
            "task.warmup_steps=3",
            "parallel=ddp_torch",
            "launcher.vote_timeout_s=20",
        )
        records = folder.records()
        assert done.returncode == 1
        assert records["naive"]["status"] == "ok"
        record = records["fault_raise_rank1_late"]
        assert record["error"]["message"] == "rank 1: ValueError: this backend always raises"
        assert record["wall_s"] < 5


def _gradients_of_rank(rank: int, folder: str) -> None:
    """One rank of two: gradients of its half of the batch, through the strategy."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    from parallel import STRATEGIES

    entry = STRATEGIES["ddp_torch"]
    strategy = entry.target(name=entry.name, **entry.preset)
    model, tokens, targets = _model_and_batch()
    wrapped = strategy.wrap(model)
    half = slice(2 * rank, 2 * rank + 2)
    _loss(wrapped, tokens[half], targets[half]).backward()
    strategy.after_backward(model)
    torch.save([parameter.grad for parameter in model.parameters()], f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _model_and_batch() -> tuple[Any, torch.Tensor, torch.Tensor]:
    from kernels import BACKENDS
    from models.config import ModelConfig
    from models.transformer import Transformer

    torch.manual_seed(3)
    sizes = {"vocab_size": 19, "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    attention = BACKENDS["naive"].target(name="naive")
    device = torch.device("cpu")
    model = Transformer(ModelConfig(name="test", **sizes), attention, device=device)
    tokens, targets = torch.randint(19, (2, 4, 12))
    return model, tokens, targets


def _loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(tokens, torch.arange(tokens.shape[1]))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_gradients_of_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    multiprocessing.spawn(_gradients_of_rank, args=(str(tmp_path),), nprocs=2)
    model, tokens, targets = _model_and_batch()
    _loss(model, tokens, targets).backward()
    for rank in range(2):
        gradients = torch.load(tmp_path / f"{rank}.pt")
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


# The user ---------------------------------------------------------------------------------


class TestInterrupt:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_stops_and_goes_on_later(
        self, number: signal.Signals, tmp_path: Path, command: Command
    ) -> None:
        folder = Folder(path=tmp_path, command=command)
        (tmp_path / "hold").touch()
        process = folder.start("attention=naive,held")
        with no_process_left(process):
            wait_until(lambda: list(tmp_path.glob("held-*")), "a case is held")
            family = descendants(process.pid)
            assert len(family) >= 2, "a worker, and a child of the worker"
            process.send_signal(number)
            started = time.monotonic()
            _, stderr = process.communicate(timeout=30)
            assert time.monotonic() - started < STOP_WITHIN_S
            assert process.returncode == 130
            assert stderr.strip().splitlines() == [
                "attnbench: stopped; the same command goes on where this one ended"
            ]
            wait_until(lambda: not any(map(is_alive, family)), "all are gone", STOP_WITHIN_S)
        assert {name: item["status"] for name, item in folder.records().items()} == {"naive": "ok"}
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
        folder = Folder(path=tmp_path, command=command)
        process = folder.start("attention=naive", "parallel=ddp_torch")
        with no_process_left(process):
            wait_until(lambda: workers_of(process), "a worker starts")
            family = descendants(process.pid)
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            _, stderr = process.communicate(timeout=30)
            assert time.monotonic() - started < STOP_WITHIN_S
            assert "Traceback" not in stderr
            assert process.returncode == 130
            wait_until(lambda: not any(map(is_alive, family)), "all are gone", STOP_WITHIN_S)
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
            [sys.executable, "-m", "harness.worker_process", "--events-fd=2", "--device=cpu"],
            env=os.environ | {"ATTNBENCH_PARENT": gone.stdout.strip(), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
        assert worker.returncode == 1
        assert worker.stderr == "the process that started this worker has ended\n"

    def test_workers_die_with_a_killed_parent(self, tmp_path: Path, command: Command) -> None:
        folder = Folder(path=tmp_path, command=command)
        (tmp_path / "hold").touch()
        process = folder.start("attention=naive,held", "parallel=ddp_torch")
        with no_process_left(process):
            wait_until(lambda: len(list(tmp_path.glob("held-*"))) == 2, "both ranks are held")
            workers = psutil.Process(process.pid).children()
            children = [child for worker in workers for child in descendants(worker.pid)]
            assert len(workers) == 2
            process.kill()
            try:
                wait_until(lambda: not any(map(is_alive, workers)), "workers end", STOP_WITHIN_S)
            finally:
                for child in children:
                    child.kill()
        assert folder.records()["naive"]["status"] == "ok"
        assert not list((folder.results / "records").glob("*.tmp"))


# Sharing ----------------------------------------------------------------------------------


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
            wait_until(lambda: len(list(tmp_path.glob("held-*"))) == 2, "both are held")
            (tmp_path / "hold").unlink()
            for process in (first, second):
                _, stderr = process.communicate(timeout=60)
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
                process.communicate(timeout=60)
                assert process.returncode == 0
        calls = one.calls()
        stretches = [
            call for call, before in zip(calls, [None, *calls], strict=False) if call != before
        ]
        assert len(stretches) == len(set(stretches)) == 8


# How cases run ----------------------------------------------------------------------------


class TestWorkers:
    def test_isolate_gives_each_case_a_process(self, tmp_path: Path, command: Command) -> None:
        folder = Folder(path=tmp_path, command=command)
        done = folder.run("attention=witness", "seq_len=16,18", "isolate=true")
        assert done.returncode == 0
        pids = {seq_len: {pid for pid, s in folder.calls() if s == seq_len} for seq_len in (16, 18)}
        assert [len(pids[seq_len]) for seq_len in (16, 18)] == [1, 1]
        assert pids[16] != pids[18]

    def test_interleaved_in_one_warm_worker(self, tmp_path: Path, command: Command) -> None:
        """Two backends in three rounds of 2, 2 and 1 passes: A B A B A B, in one process."""
        folder = Folder(path=tmp_path, command=command)
        done = folder.run(
            "attention=held,witness", "interleave=3", "task.measure_steps=5", "task.warmup_steps=0"
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
        # Each of both backends: one call of the check, in the first round, and 5 passes.
        assert len(folder.calls()) == 2 * (1 + 5)
        assert len({pid for pid, _ in folder.calls()}) == 1

    def test_warm_worker_serves_all_cases(self, tmp_path: Path, command: Command) -> None:
        """Of attention alone too; and without warm-up."""
        folder = Folder(path=tmp_path, command=command)
        done = folder.run(
            "task=attention",
            "attention=witness",
            "seq_len=4,8",
            "task.num_heads=2",
            "task.head_dim=8",
            "task.warmup_steps=0",
            "task.measure_steps=3",
        )
        assert done.returncode == 0
        assert len({pid for pid, _ in folder.calls()}) == 1
        for _, content in folder.files().values():
            record = json.loads(content)
            assert set(record["phases"]) == {"forward", "backward", "forward_backward"}
            assert record["compilation"]["recompilations"] == 0


# The disk ---------------------------------------------------------------------------------


class TestDisk:
    def test_a_record_cut_short_is_named_and_measured_again(
        self, tmp_path: Path, command: Command
    ) -> None:
        folder = Folder(path=tmp_path, command=command)
        assert folder.run("attention=naive").returncode == 0
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

    def test_a_disk_that_fills_up(self, tmp_path: Path, command: Command) -> None:
        """A limit on the size of files stands in for a full disk: the record does not fit."""
        folder = Folder(path=tmp_path, command=command)
        assert folder.run("attention=naive").returncode == 0
        before = folder.files()
        limit = 2500
        assert limit < min(len(content) for _, content in before.values())

        def limit_files() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        process = folder.start("attention=naive,witness", preexec_fn=limit_files)
        with no_process_left(process):
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == 2
        (line,) = stderr.splitlines()
        assert str(folder.results / "records") in line
        assert "witness" in line
        assert "File too large" in line
        assert folder.files() == before
        assert not list((folder.results / "records").glob("*.tmp"))
