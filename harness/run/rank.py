"""One rank of a worker group, as its leader sees it: a process here, or one behind an agent.

Both kinds speak one protocol: jobs go in as lines of JSON, events come out as lines of JSON, and
the end of the events is the end of the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from harness.paths import ROOT
from harness.run.worker_main import PARENT

LOG_LINES = 20
"""The last lines of a worker's log that go into a failed record."""


@dataclass(kw_only=True, slots=True)
class RankStart:
    """The arguments of a worker process."""

    rank: int
    local_rank: int
    """Its number among the ranks of its host, and so the index of its GPU."""
    ranks_on_host: int
    world_size: int
    device: str
    vote_timeout_s: float
    timeout_s: float
    rendezvous: str
    """torch.distributed's init_method."""
    dynamo: bool = False
    """Import torch._dynamo with torch, because the first case needs it."""


class RankProcess(Protocol):
    """A running rank."""

    stage: str
    """The stage that it last reported."""
    closed: bool
    """Whether its events have ended."""

    @property
    def name(self) -> str:
        """Its log or its host, for messages."""
        ...

    def fileno(self) -> int:
        """A file descriptor that is readable when events have arrived."""
        ...

    def send(self, line: str) -> None:
        """Send one line; if the rank has gone, the end of its events will say so."""
        ...

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The events that have arrived, and whether the rank has ended."""
        ...

    def returncode(self, wait_s: float) -> int | None:
        """The exit code, negative for a signal; None if it is unknown after ``wait_s``."""
        ...

    def log_lines(self, num_lines: int) -> list[str]:
        """The last lines that it printed."""
        ...

    def kill(self) -> list[psutil.Process]:
        """Kill it and its children without waiting; returns those of this host to wait for."""
        ...

    def reap(self) -> None:
        """Wait briefly for its end and release its resources. Never fails."""
        ...


@dataclass(slots=True)
class LocalRank:
    """A worker process on this host."""

    process: subprocess.Popen[bytes]
    events: IO[bytes]
    log: Path
    stage: str = "start"
    closed: bool = False
    _buffer: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        return str(self.log)

    def fileno(self) -> int:
        return self.events.fileno()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        data = self.events.read(1 << 20)
        if data is None:
            return [], False
        if not data:
            self.closed = True
            return [], True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines if line], False

    def returncode(self, wait_s: float) -> int | None:
        try:
            return self.process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return None

    def log_lines(self, num_lines: int) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-num_lines:]

    def kill(self) -> list[psutil.Process]:
        doomed: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            # Inductor's compile workers lead sessions of their own, so a signal to the
            # process group would miss them.
            doomed += [parent, *parent.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return doomed

    def reap(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        self.events.close()


def start_rank(start: RankStart, *, logs: Path, caches: str) -> LocalRank:
    """Start a worker process on this host; ``caches`` is where it keeps what it compiles."""
    read_fd, write_fd = os.pipe()
    # Hosts may share the folder, and have processes of one number.
    job = f"job{os.environ['SLURM_JOB_ID']}-" if "SLURM_JOB_ID" in os.environ else ""
    log = logs / f"worker-{job}{os.getpid()}-{start.world_size}x-rank{start.rank}.log"
    command = [sys.executable, "-m", "harness.run.worker_main", f"--events-fd={write_fd}"]
    command += [f"--device={start.device}", f"--rank={start.rank}"]
    command += [f"--local-rank={start.local_rank}", f"--ranks-on-host={start.ranks_on_host}"]
    command += [f"--world-size={start.world_size}", f"--vote-timeout-s={start.vote_timeout_s}"]
    command += ["--dynamo"] if start.dynamo else []
    command += [f"--caches={caches}", f"--rendezvous={start.rendezvous}"]
    # Above the parent's own limit, so that the parent ends a hang and reports it as one.
    command += [f"--collective-timeout-s={start.timeout_s + 60}"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        PARENT: str(os.getpid()),
        "LOCAL_RANK": str(start.local_rank),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            env=environment,
            # Ctrl-C in a terminal goes to the parent alone, which then ends the workers.
            start_new_session=True,
        )
    os.close(write_fd)
    os.set_blocking(read_fd, False)
    return LocalRank(process, os.fdopen(read_fd, "rb", buffering=0), log)
