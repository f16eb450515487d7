"""A group of warm workers, as its parent sees it: starts the ranks, hands them cases, ends them."""

from __future__ import annotations

import json
import selectors
import signal
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

# Importing torch from a cold disk can take most of a minute.
START_TIMEOUT_S = 180.0

# How long the other ranks have to report, once one has ended or given up.
GRACE_S = 3.0

LAST_S = 5.0
"""How long a worker whose events have ended has to end as well."""


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
        self._job = 0
        """The number of the last job; events of earlier ones are late."""
        self._began: set[int] = set()
        """The ranks that have begun with it."""
        self._staged: set[int] = set()
        """The ranks that have come to a stage of it."""
        self.environments: list[dict[str, Any]] = []
        self._ranks: list[RankProcess] = []
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
                    how = self._how_it_ended(rank) if event is None else _misfit(event)
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
                    self._note_death(rank_index, reply)
                elif isinstance(event, events.Stage) and rank_index == 0:
                    on_stage(event.stage)
                elif isinstance(event, events.Result):
                    reply.outcomes += event.outcomes
                    if event.healthy:
                        return reply
                    reply.healthy = False
                elif isinstance(event, events.Ready | events.Junk):
                    self._blame(rank_index, _misfit(event), reply)
            if not reply.healthy:
                if not reply.lost:
                    self._collect_last_words(reply)
                if reply.fault is None and not reply.lost:
                    self._note_silence(reply)
                return reply
            if late:
                self._note_timeout(reply, timeout_s)
                return reply

    def _send(self, case: Case, **terms: Any) -> None:
        self._job += 1
        self._began.clear()
        self._staged.clear()
        job = {"job": self._job, "case": case.to_dict()} | terms
        # An absolute path, since a worker may run in another folder.
        line = json.dumps(job | {"artifacts": str((self._profiles / case.id).resolve())})
        for rank in self._ranks:
            rank.stage = "start"
            # A worker that is gone is noticed later, where its events end.
            rank.send(line)

    def _had_begun(self, rank_index: int) -> bool:
        """Whether a rank's end can be the case's doing.

        Not if the rank had not begun with it. In a worker that measured other cases, the time
        before the first stage is spent on what they left; in a new one it is the case's own.
        """
        return rank_index in self._staged or (rank_index in self._began and self._job == 1)

    def _blame(self, rank_index: int, how: str, reply: Reply) -> None:
        """End the group because of one rank, and the case with it unless it had not begun."""
        reply.healthy = False
        who = f"rank {rank_index}" if self.world_size > 1 else "the worker"
        if not self._had_begun(rank_index):
            reply.lost = f"{who} {how} before the case began"
        elif reply.fault is None:
            reply.fault = "failed"
            reply.message = f"{who} {how} while {self._ranks[rank_index].stage}"

    def _note_death(self, rank_index: int, reply: Reply) -> None:
        reply.healthy = False
        if any(outcome["rank"] == rank_index for outcome in reply.outcomes):
            return
        how = self._how_it_ended(rank_index)
        # NCCL's watchdog aborts a rank whose peer has gone; the peer's own words say why.
        is_cause = self._ranks[rank_index].returncode(LAST_S) != -signal.SIGABRT or not any(
            outcome["status"] != "ok" for outcome in reply.outcomes
        )
        if is_cause:
            self._blame(rank_index, how, reply)

    def _note_timeout(self, reply: Reply, timeout_s: float) -> None:
        reply.healthy = False
        idle = [index for index in range(self.world_size) if not self._had_begun(index)]
        if idle:
            self._blame(idle[0], f"did not answer within timeout_s={timeout_s:g}", reply)
            return
        reply.fault = "timeout"
        reply.last_stages = [rank.stage for rank in self._ranks]
        stages = ", ".join(
            f"rank {index} in {stage}" for index, stage in enumerate(reply.last_stages)
        )
        where = stages if self.world_size > 1 else f"while {reply.last_stages[0]}"
        reply.message = f"exceeded timeout_s={timeout_s:g} ({where})"

    def _note_silence(self, reply: Reply) -> None:
        """Name the ranks that did not answer the others' vote."""
        heard = {outcome["rank"] for outcome in reply.outcomes}
        silent = [index for index in range(self.world_size) if index not in heard]
        if idle := [index for index in silent if not self._had_begun(index)]:
            self._blame(idle[0], "did not answer the others' vote", reply)
            return
        where = ", ".join(f"rank {index} (in {reply.last_stages[index]})" for index in silent)
        reply.message = f"no answer to the other ranks' vote from {where or 'any rank'}"

    def _collect_last_words(self, reply: Reply) -> None:
        """Wait a little for the reports of the other ranks.

        A rank that raised while its peers wait for it may be about to report, and a killed one
        may be seen to have ended only after its peers' errors.
        """
        deadline = Deadline(GRACE_S)
        while deadline.left_s() and not all(rank.closed for rank in self._ranks):
            for rank_index, event in self._poll(deadline):
                if event is None:
                    self._note_death(rank_index, reply)
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
            elif (event := self._of_this_job(event)) is not None:
                self._take_note(rank_index, event)
                yield rank_index, event

    def _of_this_job(self, event: events.Event) -> events.Event | None:
        """An event of this job, or junk in its place; None for those of earlier jobs."""
        if isinstance(event, events.Ready | events.Junk):
            return event
        if event.job > self._job:
            return events.Junk("wrote of a job that it was not given")
        if isinstance(event, events.Result):
            ranks = sorted(outcome["rank"] for outcome in event.outcomes)
            everyone = list(range(self.world_size))
            if not (ranks == everyone or (set(ranks) < set(everyone) and not event.healthy)):
                return events.Junk("wrote a result without one outcome for each rank")
        return event if event.job == self._job else None

    def _take_note(self, rank_index: int, event: events.Event) -> None:
        if isinstance(event, events.Began):
            self._began.add(rank_index)
        elif isinstance(event, events.Stage):
            self._staged.add(rank_index)
            self._ranks[rank_index].stage = event.stage

    def _how_it_ended(self, rank_index: int) -> str:
        rank = self._ranks[rank_index]
        code = rank.returncode(LAST_S)
        if code is None:
            return rank.gone
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


def _misfit(event: events.Event) -> str:
    """What a worker did, by an event that it should not have sent."""
    return event.reason if isinstance(event, events.Junk) else "wrote an event out of turn"
