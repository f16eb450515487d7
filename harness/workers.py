"""The parent's side of warm workers: start a group of ranks, hand it cases, end it for sure."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from harness.case import Case
from harness.worker_process import PARENT

# Importing torch from a cold disk can take most of a minute.
START_TIMEOUT_S = 180.0

# Once one rank has ended or given up, how long the others have to tell what they saw.
GRACE_S = 3.0


class WorkerStartError(RuntimeError):
    """The worker could not start; the message is one line, and names the log."""


@dataclass(kw_only=True, slots=True)
class Reply:
    """How one case, or one round of it, ended."""

    outcomes: list[dict[str, Any]] = field(default_factory=list)
    """What ranks reported, as it arrived; some are missing if the group broke."""
    fault: str | None = None
    """``timeout`` or ``failed`` if the group had to be ended."""
    message: str = ""
    healthy: bool = True
    """Whether the group can take another case."""
    last_stages: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    events: IO[bytes]
    log: Path
    stage: str = "start"
    buffer: bytes = b""
    closed: bool = False


class WorkerGroup:
    """``world_size`` worker processes on this host, started together and ended together."""

    def __init__(
        self,
        *,
        device: str,
        world_size: int,
        logs: Path,
        profiles: Path,
        vote_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self.device = device
        self.world_size = world_size
        self._profiles = profiles
        self.environments: list[dict[str, Any]] = []
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._scratch = tempfile.TemporaryDirectory(prefix="attnbench-")
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(world_size):
                self._spawn(rank, logs, vote_timeout_s, timeout_s)
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int, logs: Path, vote_timeout_s: float, timeout_s: float) -> None:
        read_fd, write_fd = os.pipe()
        log = logs / f"worker-{os.getpid()}-{self.world_size}x-rank{rank}.log"
        command = [sys.executable, "-m", "harness.worker_process", f"--events-fd={write_fd}"]
        command += [f"--device={self.device}", f"--rank={rank}"]
        command += [f"--world-size={self.world_size}", f"--vote-timeout-s={vote_timeout_s}"]
        command += [f"--scratch={self._scratch.name}"]
        # Above the parent's own limit, so that the parent ends a hang and knows it for one.
        command += [f"--collective-timeout-s={timeout_s + 60}"]
        root = Path(__file__).resolve().parent.parent
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            PARENT: str(os.getpid()),
            "LOCAL_RANK": str(rank),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
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
        events = os.fdopen(read_fd, "rb", buffering=0)
        self._ranks.append(_Rank(process, events, log))
        self._selector.register(events, selectors.EVENT_READ, rank)

    def _await_ready(self) -> None:
        environments: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(environments) < self.world_size:
            for rank, event in self._poll(deadline):
                if event is None:
                    raise WorkerStartError(
                        f"worker rank {rank} {self._how_it_ended(rank)} while starting; "
                        f"its log is {self._ranks[rank].log}"
                    )
                environments[rank] = event["environment"]
            if time.monotonic() > deadline:
                raise WorkerStartError(
                    f"workers took over {START_TIMEOUT_S:.0f} s to start; "
                    f"their logs are in {self._ranks[0].log.parent}"
                )
        self.environments = [environments[rank] for rank in range(self.world_size)]

    def run(
        self,
        case: Case,
        *,
        rounds: int,
        round_index: int,
        timeout_s: float,
        on_stage: Callable[[str], None],
    ) -> Reply:
        """Measure one case and wait for its result, a rank's death, or the time limit."""
        job = {"case": case.to_dict(), "rounds": rounds, "round": round_index}
        # A worker may be told from elsewhere than where it works.
        line = json.dumps(job | {"artifacts": str((self._profiles / case.id).resolve())})
        reply = Reply()
        for rank in self._ranks:
            rank.stage = "start"
            assert rank.process.stdin is not None
            # A worker that is gone is noticed below, where its events end.
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.write(line.encode() + b"\n")
                rank.process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for rank_index, event in self._poll(deadline):
                if event is None:
                    self._note_death(rank_index, reply)
                elif event["event"] == "stage":
                    self._ranks[rank_index].stage = event["stage"]
                    if rank_index == 0:
                        on_stage(event["stage"])
                elif event["event"] == "result":
                    reply.outcomes += event["outcomes"]
                    if event["healthy"]:
                        return reply
                    reply.healthy = False
            if not reply.healthy:
                self._collect_last_words(reply)
                if reply.fault is None:
                    self._note_silence(reply)
                return reply
        reply.healthy = False
        reply.fault = "timeout"
        reply.last_stages = [rank.stage for rank in self._ranks]
        stages = ", ".join(
            f"rank {index} in {stage}" for index, stage in enumerate(reply.last_stages)
        )
        where = stages if self.world_size > 1 else f"while {reply.last_stages[0]}"
        reply.message = f"exceeded timeout_s={timeout_s:g} ({where})"
        return reply

    def _note_death(self, rank_index: int, reply: Reply) -> None:
        reply.healthy = False
        if any(outcome["rank"] == rank_index for outcome in reply.outcomes):
            return
        how = self._how_it_ended(rank_index)
        # NCCL's watchdog aborts a rank whose peer has gone; the peer's own words say why.
        is_cause = self._ranks[rank_index].process.returncode != -signal.SIGABRT or not any(
            outcome["status"] != "ok" for outcome in reply.outcomes
        )
        if reply.fault is None and is_cause:
            reply.fault = "failed"
            who = f"rank {rank_index}" if self.world_size > 1 else "the worker"
            reply.message = f"{who} {how} while {self._ranks[rank_index].stage}"

    def _note_silence(self, reply: Reply) -> None:
        """Name the ranks that the others waited for in vain."""
        heard = {outcome["rank"] for outcome in reply.outcomes}
        silent = [index for index in range(self.world_size) if index not in heard]
        where = ", ".join(f"rank {index} (in {reply.last_stages[index]})" for index in silent)
        reply.message = f"no answer to the other ranks' vote from {where or 'any rank'}"

    def _collect_last_words(self, reply: Reply) -> None:
        """A rank that raised while its peers wait for it may still be about to say so.

        And one that was killed may be seen to have ended only after its peers' complaints.
        """
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not all(rank.closed for rank in self._ranks):
            for rank_index, event in self._poll(deadline):
                if event is None:
                    self._note_death(rank_index, reply)
                elif event["event"] == "result":
                    reply.outcomes += event["outcomes"]
        reply.last_stages = [rank.stage for rank in self._ranks]

    def _poll(self, deadline: float) -> list[tuple[int, dict[str, Any] | None]]:
        """Events that have arrived; None as an event means that the rank has ended."""
        events: list[tuple[int, dict[str, Any] | None]] = []
        wait_s = min(0.5, max(0.0, deadline - time.monotonic()))
        if not self._selector.get_map():
            time.sleep(wait_s)
            return events
        for key, _ in self._selector.select(wait_s):
            rank_index: int = key.data
            rank = self._ranks[rank_index]
            data = rank.events.read(1 << 20)
            if data is None:
                continue
            if not data:
                rank.closed = True
                self._selector.unregister(rank.events)
                events.append((rank_index, None))
                continue
            *lines, rank.buffer = (rank.buffer + data).split(b"\n")
            events += [(rank_index, json.loads(line)) for line in lines if line]
        return events

    def _how_it_ended(self, rank_index: int) -> str:
        process = self._ranks[rank_index].process
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        hint = {
            "SIGKILL": ", often the kernel's out-of-memory killer",
            "SIGSEGV": ", a segmentation fault",
        }.get(name, "")
        return f"was killed by signal {-code} ({name}{hint})"

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines that the ranks printed, for a failed record."""
        parts = []
        for index, rank in enumerate(self._ranks):
            lines = rank.log.read_text(errors="replace").splitlines()[-num_lines:]
            if lines:
                parts.append("\n".join([f"rank {index}:", *lines]))
        return "\n".join(parts)

    def close(self) -> None:
        """End every process of the group, and those that they started. Never fails."""
        doomed: list[psutil.Process] = []
        for rank in self._ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(rank.process.pid)
                # Inductor's compile workers lead sessions of their own, so a signal to the
                # process group would miss them.
                doomed += [parent, *parent.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(timeout=10)
            with contextlib.suppress(OSError):
                if rank.process.stdin is not None:
                    rank.process.stdin.close()
            rank.events.close()
        psutil.wait_procs(doomed, timeout=5)
        self._selector.close()
        self._scratch.cleanup()
