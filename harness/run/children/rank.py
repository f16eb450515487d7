"""One rank of a worker group, as its leader sees it: a process here, or one behind an agent.

Both kinds speak one protocol: jobs go in as lines of JSON, events come out as lines of JSON, and
the end of the events is the end of the rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from harness.paths import ROOT
from harness.run.children import family
from harness.run.children.events import EventReader
from harness.run.children.guard_main import MARK
from harness.run.children.worker_log import WorkerLog, prune

LOG_LINES = 20
"""The last lines of a worker's log that go into a failed record."""

ENTRY = "harness.run.workers.worker_main"
"""The module that a worker's process runs."""

_READ_BYTES = 2**20
_READS = 4
"""Reads in one go. A pipe holds at most one MiB, so this takes all that an ended worker wrote."""


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

    @property
    def gone(self) -> str:
        """What it has done if it ended without an exit code, for messages."""
        ...

    def fileno(self) -> int:
        """A file descriptor that is readable when events have arrived."""
        ...

    def send(self, line: str) -> None:
        """Send one line without waiting; if the rank has gone, the end of its events says so."""
        ...

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The events that have arrived, and whether the rank has ended."""
        ...

    def returncode(self, wait_s: float) -> int | None:
        """The exit code, negative for a signal; None if it is unknown after ``wait_s``."""
        ...

    def ask_for_log(self) -> None:
        """Ask for the last lines that it printed, without waiting."""
        ...

    def log_lines(self, num_lines: int) -> list[str]:
        """The last lines that it printed."""
        ...

    def kill(self) -> None:
        """Kill it and all that it has started, without waiting."""
        ...

    def reap(self) -> None:
        """Wait briefly for its end and release its resources. Never fails."""
        ...


class LocalRank:
    """A worker process on this host.

    Its end is noticed by the process itself (Linux: pidfd_open(2)): a child may hold the pipe of
    its events open for longer. Jobs are written as fast as the worker reads them, and never block.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], events: IO[bytes], log: WorkerLog, mark: str
    ) -> None:
        self.process = process
        self.stage = "start"
        self.closed = False
        self._events = events
        self._log = log
        self._mark = mark
        self._reader = EventReader()
        self._unsent = bytearray()
        self._family: set[int] = set()
        self._epoll: select.epoll | None = None
        self._pid_fd: int | None = None
        if sys.platform == "linux":
            self._epoll = select.epoll()
            self._epoll.register(events, select.EPOLLIN)
            # Kernels before 5.3 have none; a parent that looks twice a second sees it as well.
            with contextlib.suppress(OSError):
                self._pid_fd = os.pidfd_open(process.pid)
                self._epoll.register(self._pid_fd, select.EPOLLIN)

    @property
    def name(self) -> str:
        return str(self._log.path)

    @property
    def gone(self) -> str:
        return "closed its connection"

    def fileno(self) -> int:
        return self._events.fileno() if self._epoll is None else self._epoll.fileno()

    def send(self, line: str) -> None:
        self._log.trim()
        self._unsent += line.encode() + b"\n"
        self._send_rest()
        if self._unsent and self._epoll is not None:
            with contextlib.suppress(FileExistsError):
                self._epoll.register(self._jobs, select.EPOLLOUT)

    @property
    def _jobs(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def _send_rest(self) -> None:
        if not self._unsent:
            return
        try:
            while self._unsent:
                del self._unsent[: os.write(self._jobs.fileno(), self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            # It has gone, which the end of its events says.
            self._unsent.clear()
        if self._epoll is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._jobs)

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        self._log.trim()
        self._send_rest()
        # Before reading, so that what it wrote before its end has come.
        self.closed = family.has_ended(self.process)
        events: list[dict[str, Any]] = []
        for _ in range(_READS):
            data = self._events.read(_READ_BYTES)
            if data is None:
                break
            if not data:
                self.closed = True
                break
            events += self._reader.take(data)
        return events, self.closed

    def returncode(self, wait_s: float) -> int | None:
        try:
            return self.process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_for_log(self) -> None:
        """Do nothing: its log is a file here."""

    def log_lines(self, num_lines: int) -> list[str]:
        return self._log.lines(num_lines)

    def kill(self) -> None:
        self._family |= family.kill_family(self.process, self._mark)

    def reap(self) -> None:
        if self._family:
            # Those that its family started while it was being killed.
            self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        family.reap(self._family)
        with contextlib.suppress(OSError):
            self._jobs.close()
        self._events.close()
        if self._epoll is not None:
            self._epoll.close()
        if self._pid_fd is not None:
            os.close(self._pid_fd)
        self._log.close()


def library_caches(environment: Mapping[str, str], caches: str) -> dict[str, str]:
    """Variables that have libraries keep what they compile for other processes of the run.

    flash-attn-4 compiles for 10 to 15 s in each process unless it is told to, and where it is not
    told where, it loads from a folder that others can foresee.
    """
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE"
    if f"{name}_ENABLED" in environment:
        return {}
    return {f"{name}_ENABLED": "1", f"{name}_DIR": os.path.join(caches, "flash-attn-4")}


def start_rank(start: RankStart, *, logs: Path, caches: str) -> LocalRank:
    """Start a worker process on this host; ``caches`` is where it keeps what it compiles."""
    # Hosts may share the folder, and have processes of one number.
    job = f"job{os.environ['SLURM_JOB_ID']}-" if "SLURM_JOB_ID" in os.environ else ""
    log = WorkerLog(logs, f"worker-{job}{os.getpid()}-{start.world_size}x-rank{start.rank}")
    read_fd, write_fd = os.pipe()
    if start.rank == 0:
        prune(logs)
    mark = family.new_mark()
    command = [sys.executable, "-m", ENTRY, f"--events-fd={write_fd}"]
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
        # Else `python -m` searches the working folder first, and a user's models.py is there.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        MARK: mark,
        "LOCAL_RANK": str(start.local_rank),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **library_caches(os.environ, caches),
    }
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log.fd,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            env=environment,
            # Ctrl-C and Ctrl-Z in a terminal go to the parent alone. It ends the workers then, or
            # leaves them to finish their case, whose times a stop would spoil.
            start_new_session=True,
        )
    except BaseException:
        os.close(read_fd)
        log.close()
        raise
    finally:
        os.close(write_fd)
    assert process.stdin is not None
    os.set_blocking(read_fd, False)
    os.set_blocking(process.stdin.fileno(), False)
    return LocalRank(process, os.fdopen(read_fd, "rb", buffering=0), log, mark)
