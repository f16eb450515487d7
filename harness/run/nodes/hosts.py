"""The hosts of a run: which ranks run on which, and the leader's side of ranks on other hosts.

The leader (rank 0's host) listens at the rendezvous endpoint; every other rank has an agent
(:mod:`harness.run.nodes.agent`) that connects to it and stays while cases are measured, so that a
group of workers that broke can be started again. On Slurm an agent is one of the job's tasks and
the endpoint comes from the job's environment; elsewhere a user starts the same command on every
host and names the endpoint. Both ends of a connection prove that they know the run's secret
(:mod:`harness.run.nodes`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import __version__
from harness.printing import warn
from harness.run.children.rank import RankProcess, RankStart, start_rank
from harness.run.nodes import address as addresses
from harness.run.nodes import messages
from harness.run.nodes.door import Door
from harness.run.nodes.errors import HostError
from harness.run.nodes.link import Link

CONNECT_TIMEOUT_S = 300.0
"""How long hosts wait for each other; one node of a job may start minutes after another."""

CLOCK_TOLERANCE_S = 2.0

LOG_WAIT_S = 10.0
"""How long an agent may take to send its worker's last lines."""

KILL_WAIT_S = 20.0
"""How long an agent may take to end its worker, before its leader gives it up."""


class Hosts:
    """Starts each rank of a worker group on its host; without arguments, all of them on this one.

    Args:
        local_ranks: number of ranks, from 0 on, that this process starts; the others have agents.
        ranks_per_node: number of ranks on each host, whoever starts them.
    """

    def __init__(self, local_ranks: int | None = None, ranks_per_node: int | None = None) -> None:
        self.local_ranks = local_ranks
        self.ranks_per_node = ranks_per_node
        self.warnings: list[str] = []
        self._agents: dict[int, Link] = {}
        self._address = ""

    @classmethod
    @contextlib.contextmanager
    def gathered(
        cls,
        *,
        address: str,
        port: int,
        world_size: int,
        local_ranks: int,
        ranks_per_node: int,
        key: bytes,
        run: str,
    ) -> Iterator[Hosts]:
        """Wait until the agents of all further ranks have connected; dismiss them at the end.

        Args:
            key: follows from the run's secret; agents prove that they know it.
            run: the run's name, which agents with the same secret must give.

        Raises HostError if they do not connect in time, or run another version.
        """
        hosts = cls(local_ranks, ranks_per_node)
        hosts._address = address
        try:
            hosts._accept(port, world_size, key, run)
            yield hosts
        finally:
            for link in hosts._agents.values():
                link.close()

    def _accept(self, port: int, world_size: int, key: bytes, run: str) -> None:
        wanted = set(range(self.local_ranks or 0, world_size))
        if not wanted:
            return

        def judge(hello: messages.Hello) -> tuple[str, bool] | None:
            return _why_refused(hello, run, world_size)

        with addresses.listen(self._address, port) as listener:
            if warning := addresses.warning_about(self._address, listener):
                warn(warning)
            door = Door(listener, key, wanted, judge)
            try:
                joined = door.gather(CONNECT_TIMEOUT_S)
            except TimeoutError as error:
                ranks = ", ".join(map(str, sorted(door.missing)))
                raise HostError(
                    f"no agent of ranks {ranks} came to port {port} within "
                    f"{CONNECT_TIMEOUT_S:.0f} s; are all nodes up and can they reach this one?"
                ) from error
        for rank, (link, hello, apart_s) in sorted(joined.items()):
            self._agents[rank] = link
            if abs(apart_s) > CLOCK_TOLERANCE_S:
                self.warnings.append(clocks_differ(hello.host, apart_s))

    def rendezvous(self, world_size: int, scratch: str) -> str:
        """torch.distributed's init_method for a new group of workers."""
        if self.local_ranks is None or world_size <= self.local_ranks:
            return f"file://{scratch}/rendezvous"
        with addresses.listen(self._address, 0) as free:
            port = free.getsockname()[1]
        return addresses.url(self._address, port)

    def start(self, start: RankStart, *, logs: Path, caches: str) -> RankProcess:
        """Start one rank on its host; OSError or HostError if that host has gone."""
        here = self.local_ranks is None or start.rank < self.local_ranks
        start.ranks_on_host = min(start.world_size, self.ranks_per_node or start.world_size)
        start.local_rank = start.rank % start.ranks_on_host
        if here:
            return start_rank(start, logs=logs, caches=caches)
        if start.rank not in self._agents:
            raise HostError(f"rank {start.rank}: no node was given for it")
        return RemoteRank(self._agents[start.rank], start)


class RemoteRank:
    """A worker behind an agent, on another host."""

    def __init__(self, link: Link, start: RankStart) -> None:
        self.stage = "start"
        self.closed = False
        self._link = link
        self._code: int | None = None
        self._log: list[str] = []
        self._log_until_s: float | None = None
        self._killed_until_s: float | None = None
        link.send(messages.Start(start=asdict(start)))

    @property
    def name(self) -> str:
        return f"on {self._link.host}"

    @property
    def gone(self) -> str:
        return f"on {self._link.host} {self._link.why_broken}"

    def fileno(self) -> int:
        return self._link.fileno()

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._link.send(messages.Job(line=line))

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        gone = self._link.fill(0.0)
        events = []
        for message in self._link.taken():
            if isinstance(message, messages.Event):
                events.append(message.event)
            elif isinstance(message, messages.Ended):
                self.closed = True
                self._code, self._log = message.code, message.log
        self.closed = self.closed or gone
        return events, self.closed

    def returncode(self, wait_s: float) -> int | None:
        return self._code

    def ask_for_log(self) -> None:
        if not self._log and not self._link.broken and self._log_until_s is None:
            self._log_until_s = time.monotonic() + LOG_WAIT_S
            with contextlib.suppress(OSError):
                self._link.send(messages.WantLog())

    def log_lines(self, num_lines: int) -> list[str]:
        self.ask_for_log()
        if not self._log and not self._link.broken and self._log_until_s is not None:
            wait_s = self._log_until_s - time.monotonic()
            answer = self._link.receive_one(messages.LogLines, wait_s)
            if answer is not None:
                self._log = answer.log
                self._log_until_s = None
            else:
                # Asked once: what comes later would be taken for another answer.
                self._link.give_up(f"did not send its log for {LOG_WAIT_S:g} s")
        if self._link.broken and not self._log:
            return [f"node {self._link.host} {self._link.why_broken}"]
        return self._log[-num_lines:]

    def kill(self) -> None:
        if self._killed_until_s is None:
            self._killed_until_s = time.monotonic() + KILL_WAIT_S
        with contextlib.suppress(OSError):
            self._link.send(messages.Kill())

    def reap(self) -> None:
        now_s = time.monotonic()
        until_s = now_s + KILL_WAIT_S if self._killed_until_s is None else self._killed_until_s
        if not self._link.broken and not self._link.receive_one(messages.Killed, until_s - now_s):
            # What its worker says later would be taken for the words of the next one.
            self._link.give_up(f"did not end its worker for {KILL_WAIT_S:g} s")


def clocks_differ(host: str, apart_s: float) -> str:
    """A warning about a host's clock that is ahead (or, if negative, behind)."""
    way = "ahead" if apart_s > 0 else "behind"
    return (
        f"{host}: its clock is {abs(apart_s):.0f} s {way}; start times there are off by that, "
        "durations are right; let chrony or NTP set it"
    )


def _why_refused(hello: messages.Hello, run: str, world_size: int) -> tuple[str, bool] | None:
    """Why an agent cannot join, and whether that ends the run; None if it can."""
    if hello.run != run:
        return "another run holds this endpoint; give both the same launcher.rdzv_id", False
    if hello.version != __version__:
        reason = (
            f"{hello.host}: runs attnbench {hello.version}, "
            f"the leader {__version__}; install the same on all nodes"
        )
        return reason, True
    if hello.rank >= world_size:
        reason = (
            f"{hello.host}: has rank {hello.rank}, and this run has {world_size}; give "
            "launcher.nnodes and launcher.ranks_per_node alike on all hosts"
        )
        return reason, True
    return None
