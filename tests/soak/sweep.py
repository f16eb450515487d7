"""The sweep that faults are inflicted on: its folder, its commands and its processes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from harness.paths import ROOT

MARK = "ATTNBENCH_SOAK"
"""The environment variable by which every process of a soak is found, whoever started it."""

TWO_RANKS = 4
"""Cases of a sweep that run on two ranks."""

SLURM = ("launcher=slurm", "wait=true", "launcher.poll_s=0.3", "launcher.cases_per_task=10")
SLURM += ("launcher.gpus_per_node=2", "launcher.time_min=10", "timeout_s=120")

MOST_BYTES = 6 << 30
"""Address space of a process: one that reads an endless file fails instead of the machine."""

HANGS_S = 120.0
"""After this a command that only reads is taken to hang."""

ENTRY = "import sys; from harness.commands import console; sys.exit(console.{}())"


@dataclass(kw_only=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    said: str


@dataclass(kw_only=True, slots=True)
class Sweep:
    """One results folder, and the commands that run on it."""

    path: Path
    num_cases: int
    interleave: int = 1
    slurm: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(6))
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in (self.results, self.path / "tmp", self.path / "said"):
            folder.mkdir(parents=True, exist_ok=True)
        indices = list(range(self.num_cases))
        grids = [
            {"task": "sleeping", "task.index": indices[TWO_RANKS:]},
            {"task": "sleeping", "task.index": indices[:TWO_RANKS], "task.ranks": 2},
        ]
        sweep = {"title": "Soak", "tables": ["cases"], "scales": {"tiny": grids}}
        (self.path / "soak.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")

    @property
    def results(self) -> Path:
        return self.path / "results"

    @property
    def records(self) -> Path:
        return self.results / "records"

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            MARK: self.token,
            "ATTNBENCH_PLUGINS": "tests.soak.sleeping",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.path / "tmp"),
        }

    def start(self) -> None:
        """Start the command that measures what is missing."""
        values = [f"sweeps={self.path / 'soak.yaml'}", f"results={self.results}", "device=cpu"]
        values += [f"interleave={self.interleave}", "fresh_rounds=false", "retry=true"]
        values += SLURM if self.slurm else ()
        with tempfile.NamedTemporaryFile(dir=self.path / "said", delete=False) as said:
            process = subprocess.Popen(
                [sys.executable, "-c", ENTRY.format("attnbench"), *values],
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_limit,
            )
        (self.path / "said" / str(process.pid)).symlink_to(said.name)
        self.commands.append(process)

    def ended(self) -> list[Ended]:
        """The commands that have ended since the last call."""
        over = [process for process in self.commands if process.poll() is not None]
        self.commands = [process for process in self.commands if process not in over]
        return [Ended(code=process.returncode, said=self._said(process.pid)) for process in over]

    def _said(self, pid: int) -> str:
        return (self.path / "said" / str(pid)).read_text(encoding="utf-8", errors="replace")

    def run(self, function: str, *further: str) -> Ended:
        """Run attnbench-status, -report or -cancel on the results."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", ENTRY.format(function), str(self.results), *further],
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=HANGS_S,
                preexec_fn=_limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Ended(code=-1, said=f"it hangs for {HANGS_S:g} s")
        return Ended(code=done.returncode, said=done.stdout.decode(errors="replace"))

    def processes(self) -> list[psutil.Process]:
        """All processes of this sweep but the commands; zombies are none."""
        ours = {process.pid for process in self.commands}
        return [process for process in marked(self.token) if process.pid not in ours]

    def workers(self) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "harness.run.workers.worker_main" in process.cmdline():
                    found.append(process)
        return found

    def case_ids(self) -> list[str]:
        for path in self.results.glob("sweeps/*/plan.json"):
            with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
                return list(json.loads(path.read_text(encoding="utf-8"))["case_ids"])
        return []


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def marked(token: str) -> Iterator[psutil.Process]:
    """Living processes that have the token in their environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == token:
                yield process
