"""A group of warm workers, as its parent sees it: starts the ranks, hands them cases, ends them."""

from __future__ import annotations

import json
import selectors
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from harness.cases.case import Case
from harness.run.hosts import HostError, Hosts
from harness.run.options import RunOptions
from harness.run.rank import LocalRank, RankProcess, RankStart

# Importing torch from a cold disk can take most of a minute.
START_TIMEOUT_S = 180.0

# How long the other ranks have to report, once one has ended or given up.
GRACE_S = 3.0


class WorkerStartError(RuntimeError):
    """A worker could not start; the message is one line and names the log."""


@dataclass(kw_only=True, slots=True)
class Reply:
    """How one case, or one round of it, ended."""

    outcomes: list[dict[str, Any]] = field(default_factory=list)
    """The ranks' reports in the order of arrival; incomplete if the group broke."""
    fault: str | None = None
    """``timeout`` or ``failed`` if the group had to be ended."""
    message: str = ""
    healthy: bool = True
    """Whether the group can take another case."""
    last_stages: list[str] = field(default_factory=list)


class WorkerGroup:
    """``world_size`` worker processes, started together and ended together.

    Args:
        caches: a folder for what they compile, which outlives them.
    """

    def __init__(
        self,
        *,
        device: str,
        world_size: int,
        options: RunOptions,
        caches: str,
        hosts: Hosts | None = None,
        dynamo: bool = False,
    ) -> None:
        self.device = device
        self.world_size = world_size
        self._profiles = options.results / "profiles"
        self.environments: list[dict[str, Any]] = []
        self._ranks: list[RankProcess] = []
        hosts = hosts or Hosts()
        self._selector = selectors.DefaultSelector()
        self._scratch = tempfile.TemporaryDirectory(prefix="attnbench-")
        logs = options.results / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        try:
            rendezvous = hosts.rendezvous(world_size, self._scratch.name)
            for rank in range(world_size):
                start = RankStart(
                    rank=rank,
                    local_rank=rank,
                    ranks_on_host=world_size,
                    world_size=world_size,
                    device=device,
                    vote_timeout_s=options.vote_timeout_s,
                    timeout_s=options.timeout_s,
                    rendezvous=rendezvous,
                    dynamo=dynamo,
                )
                try:
                    process = hosts.start(start, logs=logs, caches=caches)
                except (HostError, ConnectionError, TimeoutError) as error:
                    raise WorkerStartError(f"worker rank {rank}: {error}") from error
                self._ranks.append(process)
                self._selector.register(process, selectors.EVENT_READ, rank)
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _await_ready(self) -> None:
        environments: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(environments) < self.world_size:
            for rank, event in self._poll(deadline):
                if event is None:
                    raise WorkerStartError(
                        f"worker rank {rank} {self._how_it_ended(rank)} while starting; "
                        f"its log is {self._ranks[rank].name}"
                    )
                environments[rank] = event["environment"]
            if time.monotonic() > deadline:
                raise WorkerStartError(
                    f"workers took over {START_TIMEOUT_S:.0f} s to start; "
                    f"their logs are {', '.join(rank.name for rank in self._ranks)}"
                )
        self.environments = [environments[rank] for rank in range(self.world_size)]

    def run(
        self,
        case: Case,
        *,
        rounds: int,
        round_index: int,
        until_decided: bool,
        timeout_s: float,
        on_stage: Callable[[str], None],
    ) -> Reply:
        """Measure one case and wait for its result, a rank's death, or the time limit."""
        job = {
            "case": case.to_dict(),
            "rounds": rounds,
            "round": round_index,
            "until_decided": until_decided,
        }
        # An absolute path, since a worker may run in another folder.
        line = json.dumps(job | {"artifacts": str((self._profiles / case.id).resolve())})
        reply = Reply()
        for rank in self._ranks:
            rank.stage = "start"
            # A worker that is gone is noticed below, where its events end.
            rank.send(line)
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
        is_cause = self._ranks[rank_index].returncode(5.0) != -signal.SIGABRT or not any(
            outcome["status"] != "ok" for outcome in reply.outcomes
        )
        if reply.fault is None and is_cause:
            reply.fault = "failed"
            who = f"rank {rank_index}" if self.world_size > 1 else "the worker"
            reply.message = f"{who} {how} while {self._ranks[rank_index].stage}"

    def _note_silence(self, reply: Reply) -> None:
        """Name the ranks that did not answer the others' vote."""
        heard = {outcome["rank"] for outcome in reply.outcomes}
        silent = [index for index in range(self.world_size) if index not in heard]
        where = ", ".join(f"rank {index} (in {reply.last_stages[index]})" for index in silent)
        reply.message = f"no answer to the other ranks' vote from {where or 'any rank'}"

    def _collect_last_words(self, reply: Reply) -> None:
        """Wait a little for the reports of the other ranks.

        A rank that raised while its peers wait for it may be about to report, and a killed one
        may be seen to have ended only after its peers' errors.
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
        """The events that have arrived, by rank; None as an event is the end of the rank."""
        events: list[tuple[int, dict[str, Any] | None]] = []
        wait_s = min(0.5, max(0.0, deadline - time.monotonic()))
        if not self._selector.get_map():
            time.sleep(wait_s)
            return events
        for key, _ in self._selector.select(wait_s):
            rank_index: int = key.data
            rank = self._ranks[rank_index]
            arrived, ended = rank.read()
            events += [(rank_index, event) for event in arrived]
            if ended:
                self._selector.unregister(rank)
                events.append((rank_index, None))
        return events

    def _how_it_ended(self, rank_index: int) -> str:
        rank = self._ranks[rank_index]
        code = rank.returncode(5.0)
        if code is None:
            return (
                "closed its connection" if isinstance(rank, LocalRank) else f"{rank.name} has gone"
            )
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
            lines = rank.log_lines(num_lines)
            if lines:
                parts.append("\n".join([f"rank {index}:", *lines]))
        return "\n".join(parts)

    def close(self) -> None:
        """End every process of the group and their children. Never fails."""
        doomed = [process for rank in self._ranks for process in rank.kill()]
        for rank in self._ranks:
            rank.reap()
        psutil.wait_procs(doomed, timeout=5)
        self._selector.close()
        self._scratch.cleanup()
