"""A group of warm workers, as its parent sees it: starts the ranks, hands them cases, ends them."""

from __future__ import annotations

import json
import selectors
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.cases.case import Case
from harness.run.children import events
from harness.run.children.deadline import POLL_S, Deadline
from harness.run.children.rank import RankProcess, RankStart
from harness.run.children.reply import Reply
from harness.run.nodes.hosts import HostError, Hosts
from harness.run.workers.job_watch import JobWatch, misfit

# Importing torch from a cold disk can take most of a minute.
START_TIMEOUT_S = 180.0

# How long the other ranks have to report, once one has ended or given up.
GRACE_S = 3.0


class WorkerStartError(RuntimeError):
    """A worker could not start; the message is one line and names the log."""


class WorkerGroup:
    """``world_size`` worker processes, started together and ended together.

    Args:
        results: the folder that their logs and profiles go to.
        timeout_s: the time limit of a case.
        vote_timeout_s: how long a rank waits for the others' vote on a case.
        caches: a folder for what they compile, which outlives them.
    """

    def __init__(
        self,
        *,
        device: str,
        world_size: int,
        results: Path,
        timeout_s: float,
        vote_timeout_s: float,
        caches: str,
        hosts: Hosts | None = None,
        dynamo: bool = False,
    ) -> None:
        self.device = device
        self.world_size = world_size
        self._profiles = results / "profiles"
        self.environments: list[dict[str, Any]] = []
        self._ranks: list[RankProcess] = []
        self._watch = JobWatch(self._ranks)
        self._arrived: deque[tuple[int, events.Event | None]] = deque()
        hosts = hosts or Hosts()
        self._selector = selectors.DefaultSelector()
        self._scratch = tempfile.TemporaryDirectory(prefix="attnbench-")
        logs = results / "logs"
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
                    vote_timeout_s=vote_timeout_s,
                    timeout_s=timeout_s,
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
        deadline = Deadline(START_TIMEOUT_S)
        while len(environments) < self.world_size:
            late = not deadline.left_s()
            for rank, event in self._poll(deadline):
                if isinstance(event, events.Ready):
                    environments[rank] = event.environment
                else:
                    how = self._watch.how_it_ended(rank) if event is None else misfit(event)
                    raise WorkerStartError(
                        f"worker rank {rank} {how} while starting; "
                        f"its log is {self._ranks[rank].name}"
                    )
            if late and len(environments) < self.world_size:
                raise WorkerStartError(
                    f"workers took over {START_TIMEOUT_S:.0f} s to start; {self.logs}"
                )
        self.environments = [environments[rank] for rank in range(self.world_size)]

    @property
    def logs(self) -> str:
        """Where the ranks' logs are, as the end of a message."""
        names = [rank.name for rank in self._ranks]
        return f"its log is {names[0]}" if len(names) == 1 else f"their logs are {', '.join(names)}"

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
        self._send(case, rounds=rounds, round=round_index, until_decided=until_decided)
        reply = Reply()
        deadline = Deadline(timeout_s)
        while True:
            # What has come by now is read once more before the time is up.
            late = not deadline.left_s()
            for rank_index, event in self._poll(deadline):
                if event is None:
                    self._watch.note_death(rank_index, reply)
                elif isinstance(event, events.Stage) and rank_index == 0:
                    on_stage(event.stage)
                elif isinstance(event, events.Result):
                    reply.outcomes += event.outcomes
                    if event.healthy:
                        return reply
                    reply.healthy = False
                elif isinstance(event, events.Ready | events.Junk):
                    self._watch.blame(rank_index, misfit(event), reply)
            if not reply.healthy:
                if not reply.lost:
                    self._collect_last_words(reply)
                if reply.fault is None and not reply.lost:
                    self._watch.note_silence(reply)
                return reply
            if late:
                self._watch.note_timeout(reply, timeout_s)
                return reply

    def _send(self, case: Case, **terms: Any) -> None:
        job = {"job": self._watch.next(), "case": case.to_dict()} | terms
        # An absolute path, since a worker may run in another folder.
        line = json.dumps(job | {"artifacts": str((self._profiles / case.id).resolve())})
        for rank in self._ranks:
            rank.stage = "start"
            # A worker that is gone is noticed later, where its events end.
            rank.send(line)

    def _collect_last_words(self, reply: Reply) -> None:
        """Wait a little for the reports of the other ranks.

        A rank that raised while its peers wait for it may be about to report, and a killed one
        may be seen to have ended only after its peers' errors.
        """
        deadline = Deadline(GRACE_S)
        while deadline.left_s() and not all(rank.closed for rank in self._ranks):
            for rank_index, event in self._poll(deadline):
                if event is None:
                    self._watch.note_death(rank_index, reply)
                elif isinstance(event, events.Result):
                    reply.outcomes += event.outcomes
        reply.last_stages = [rank.stage for rank in self._ranks]

    def _poll(self, deadline: Deadline) -> Iterator[tuple[int, events.Event | None]]:
        """The events that have arrived, by rank; None as an event is the end of the rank.

        Those that are not taken, since a job has ended before, stay for the next.
        """
        wait_s = 0.0 if self._arrived else min(POLL_S, deadline.left_s())
        if self._selector.get_map():
            self._selector.select(wait_s)
        else:
            time.sleep(wait_s)
        # Those as well that have nothing to say: their logs are looked after.
        for rank_index, rank in enumerate(self._ranks):
            if not rank.closed:
                found, ended = rank.read()
                self._arrived += [(rank_index, events.typed(event)) for event in found]
                if ended:
                    self._selector.unregister(rank)
                    self._arrived.append((rank_index, None))
        while self._arrived:
            rank_index, event = self._arrived.popleft()
            if event is None:
                yield rank_index, None
            elif (event := self._watch.of_this_job(event)) is not None:
                self._watch.take_note(rank_index, event)
                yield rank_index, event

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines that the ranks printed, for a failed record."""
        parts = []
        # All are asked before any is waited for, so that the waits for hosts that hang are one.
        for rank in self._ranks:
            rank.ask_for_log()
        for index, rank in enumerate(self._ranks):
            lines = rank.log_lines(num_lines)
            if lines:
                parts.append("\n".join([f"rank {index} ({rank.name}):", *lines]))
        return "\n".join(parts)

    def close(self) -> None:
        """End every process of the group and their children. Never fails."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.reap()
        self._selector.close()
        self._scratch.cleanup()
