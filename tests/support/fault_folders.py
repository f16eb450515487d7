"""A results folder, and the real command that measures there on one CPU.

Its sweep calls the misbehaving backends of :mod:`tests.support.faults`, alone or to train
transformers of a few hundred parameters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from conftest import ROOT, Command

CALL = {
    "task": "attention",
    "task.num_heads": 2,
    "task.head_dim": 8,
    "seq_len": 16,
    "batch_size": 1,
    "task.warmup_steps": 1,
    "task.measure_steps": 2,
}
"""What is not about training calls attention alone: its workers start in half the time."""

STEP = {
    "task": "train_step",
    "model": "tiny",
    "model.d_model": 16,
    "model.d_ff": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.vocab_size": 16,
    "seq_len": 16,
    "batch_size": 1,
    "task.warmup_steps": 1,
    "task.measure_steps": 2,
}

STOPPED = "attnbench: stopped; the same command goes on where this one ended"

GUARD_S = 240.0
"""After this a test takes something to hang; nothing that works on a busy machine needs as long."""


def heed_signals() -> None:
    """Undo, in a process that starts, what nohup and a shell's background jobs ignore."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """Time limits for cases that hang, from what a healthy case of their kind took just now."""

    healthy_s: float

    @property
    def vote_s(self) -> float:
        """How long ranks wait for each other: longer than a whole healthy case."""
        return round(1 + 2 * self.healthy_s, 1)

    @property
    def case_s(self) -> float:
        """How long a case may take: a failing vote in it, and more than three healthy cases."""
        return round(1 + self.vote_s + 3 * self.healthy_s, 1)

    def arguments(self) -> tuple[str, str]:
        return f"timeout_s={self.case_s}", f"launcher.vote_timeout_s={self.vote_s}"


@dataclass(kw_only=True, slots=True)
class Folder:
    """One results folder, and the folder through which backends talk to a test."""

    path: Path
    command: Command
    grids: Sequence[dict[str, Any]] = (CALL,)

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        sweep = {"title": "Faults", "tables": ["summary"], "scales": {"tiny": list(self.grids)}}
        (self.path / "faults.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")

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
            "ATTNBENCH_PLUGINS": "tests.support.faults",
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
            **{"preexec_fn": heed_signals, **options},
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


def wait_until_held(folder: Folder, processes: int = 1) -> None:
    """Wait until so many processes hold a case, as the backend ``held`` does."""
    what = f"{processes} processes hold a case"
    wait_until(lambda: len(list(folder.path.glob("held-*"))) == processes, what)


def stops_cleanly(
    folder: Folder, process: subprocess.Popen[str], stop: Callable[[], None], returncode: int
) -> None:
    """A command that has measured one case and holds another says one line, and leaves nothing.

    Stopping takes no longer than the command took to get to where it is, which included starting
    an interpreter and workers.
    """
    family = descendants(process.pid)
    assert len(family) >= 2, "a worker, and a child of the worker"
    began = time.monotonic()
    limit_s = max(5.0, time.time() - psutil.Process(process.pid).create_time())
    stop()
    _, stderr = process.communicate(timeout=GUARD_S)
    assert time.monotonic() - began < limit_s
    assert process.returncode == returncode, stderr
    assert stderr.strip().splitlines() == [STOPPED]
    wait_until(lambda: not any(map(is_alive, family)), "all are gone")
    assert {name: item["status"] for name, item in folder.records().items()} == {"naive": "ok"}
    assert list((folder.results / "runs").iterdir()) == []


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that have become workers."""
    found = []
    for child in descendants(process.pid):
        with suppress(psutil.Error):
            if "harness.run.workers.worker_main" in child.cmdline():
                found.append(child)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = GUARD_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
