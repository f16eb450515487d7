"""Ranks on other hosts: an agent there starts workers and passes lines to and from the leader.

The leader (rank 0's host) listens at the rendezvous endpoint; every other rank has an agent
that connects to it and stays while cases are measured, so that a group of workers that broke
can be started again. On Slurm an agent is one of the job's tasks and the endpoint comes from
the job's environment; elsewhere a user starts the same command on every host and names it.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness import __version__
from harness.run.rank_process import LocalRank, RankProcess, RankStart, start_rank

CONNECT_TIMEOUT_S = 300.0
"""How long hosts wait for each other: jobs of one node may start minutes after another's."""

CLOCK_TOLERANCE_S = 2.0

_LOG_LINES = 20


class AgentError(RuntimeError):
    """Hosts that do not come together; the message is one line with the remedy."""


class Hosts:
    """Where the ranks of worker groups run: without arguments, all of them on this host.

    Args:
        local_ranks: how many ranks, from 0 on, this process starts itself; others have agents.
        ranks_per_node: how many there are on each host, agents' ones included.
    """

    def __init__(self, local_ranks: int | None = None, ranks_per_node: int | None = None) -> None:
        self.local_ranks = local_ranks
        self.ranks_per_node = ranks_per_node
        self.warnings: list[str] = []
        self._agents: dict[int, _Link] = {}
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
        token: str,
    ) -> Iterator[Hosts]:
        """Listen until the agents of all further ranks have come; let them go at the end.

        Raises AgentError if they do not come in time, or are of another version.
        """
        hosts = cls(local_ranks, ranks_per_node)
        hosts._address = address
        try:
            hosts._accept(port, world_size, token)
            yield hosts
        finally:
            for link in hosts._agents.values():
                link.close()

    def _accept(self, port: int, world_size: int, token: str) -> None:
        missing = set(range(self.local_ranks or 0, world_size))
        if not missing:
            return
        try:
            listener = socket.create_server(("", port), backlog=world_size)
        except OSError as error:
            raise AgentError(
                f"port {port} on {socket.gethostname()} cannot be listened on ({error.strerror}); "
                "name another one in launcher.rdzv_endpoint"
            ) from error
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        with listener:
            while missing:
                listener.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError as error:
                    ranks = ", ".join(map(str, sorted(missing)))
                    raise AgentError(
                        f"no agent of ranks {ranks} came to port {port} within "
                        f"{CONNECT_TIMEOUT_S:.0f} s; are all nodes up and can they reach this one?"
                    ) from error
                link = _Link(connection)
                hello = link.receive(timeout_s=10.0) or {}
                reason = _why_refused(hello, token, missing)
                if reason is not None:
                    link.send({"refused": reason})
                    link.close()
                    # A stranger is no reason to give up; one of ours with another version is.
                    if hello.get("token") == token:
                        raise AgentError(reason)
                    continue
                link.host = str(hello["host"])
                apart_s = hello["time_s"] - time.time()
                if abs(apart_s) > CLOCK_TOLERANCE_S:
                    self.warnings.append(clocks_differ(link.host, apart_s))
                link.send({"welcome": True})
                self._agents[hello["rank"]] = link
                missing.discard(hello["rank"])

    def rendezvous(self, world_size: int, scratch: str) -> str:
        """torch.distributed's init_method for a new group of workers."""
        if self.local_ranks is None or world_size <= self.local_ranks:
            return f"file://{scratch}/rendezvous"
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        return f"tcp://{self._address}:{port}"

    def start(self, start: RankStart, *, logs: Path, scratch: str) -> RankProcess:
        """Start one rank where it belongs; OSError or AgentError if its host has gone."""
        here = self.local_ranks is None or start.rank < self.local_ranks
        start.ranks_on_host = min(start.world_size, self.ranks_per_node or start.world_size)
        start.local_rank = start.rank % start.ranks_on_host
        if here:
            return start_rank(start, logs=logs, scratch=scratch)
        if start.rank not in self._agents:
            raise AgentError(f"rank {start.rank}: no node was given for it")
        return RemoteRank(self._agents[start.rank], start)


def serve_agent(*, address: str, port: int, rank: int, token: str, logs: Path) -> int:
    """Be the agent of one rank until the leader is done; how many workers were started.

    Raises AgentError if the leader cannot be reached or refuses.
    """
    with contextlib.closing(_Link(_connect(address, port))) as link:
        hello = {"rank": rank, "token": token, "host": socket.gethostname()}
        link.send(hello | {"version": __version__, "time_s": time.time()})
        answer = link.receive(timeout_s=CONNECT_TIMEOUT_S) or {}
        if "welcome" not in answer:
            raise AgentError(answer.get("refused", f"{address}:{port} is no leader of this run"))
        number = 0
        while (order := link.receive(timeout_s=None)) is not None:
            if "start" not in order:
                continue
            number += 1
            with tempfile.TemporaryDirectory(prefix="attnbench-") as scratch:
                worker = start_rank(RankStart(**order["start"]), logs=logs, scratch=scratch)
                alive = _pass_on(link, worker)
            if not alive:
                break
        return number


def _pass_on(link: _Link, worker: LocalRank) -> bool:
    """Pass lines both ways until the leader wants the worker ended; False if it has gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        selector.register(worker, selectors.EVENT_READ)
        try:
            while True:
                for order in link.taken():
                    if "job" in order:
                        worker.send(order["job"])
                    elif "log" in order:
                        link.send({"log": worker.log_lines(_LOG_LINES)})
                    elif "kill" in order:
                        return True
                for key, _ in selector.select():
                    if key.fileobj is link:
                        if link.fill(0.0):
                            return False
                        continue
                    events, ended = worker.read()
                    for event in events:
                        link.send({"event": event})
                    if ended:
                        selector.unregister(worker)
                        code = worker.returncode(5.0)
                        link.send({"ended": code, "log": worker.log_lines(_LOG_LINES)})
        except OSError:
            return False
        finally:
            doomed = worker.kill()
            worker.reap()
            psutil.wait_procs(doomed, timeout=5)
            with contextlib.suppress(OSError):
                link.send({"killed": True})


class RemoteRank:
    """A worker behind an agent, on another host."""

    def __init__(self, link: _Link, start: RankStart) -> None:
        self.stage = "start"
        self.closed = False
        self._link = link
        self._code: int | None = None
        self._log: list[str] = []
        self._lost = False
        link.send({"start": asdict(start)})

    @property
    def name(self) -> str:
        return f"on {self._link.host}"

    def fileno(self) -> int:
        return self._link.fileno()

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._link.send({"job": line})

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        gone = self._link.fill(0.0)
        events = []
        for message in self._link.taken():
            if "event" in message:
                events.append(message["event"])
            elif "ended" in message:
                self.closed = True
                self._code, self._log = message["ended"], message["log"]
        if gone:
            self.closed = self._lost = True
        return events, self.closed

    def returncode(self, wait_s: float) -> int | None:
        return self._code

    def log_lines(self, num_lines: int) -> list[str]:
        if self._lost:
            return [f"node {self._link.host} has gone"]
        if not self._log:
            with contextlib.suppress(OSError):
                self._link.send({"log": True})
                answer = self._link.receive_with("log", timeout_s=10.0)
                self._log = (answer or {}).get("log", [])
        return self._log[-num_lines:]

    def kill(self) -> list[psutil.Process]:
        with contextlib.suppress(OSError):
            self._link.send({"kill": True})
        return []

    def reap(self) -> None:
        if not self._lost:
            with contextlib.suppress(OSError):
                self._link.receive_with("killed", timeout_s=20.0)


@dataclass(slots=True)
class _Link:
    """A connection that carries one JSON object a line."""

    connection: socket.socket
    host: str = ""
    _buffer: bytes = b""
    _waiting: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A node that loses its power says no goodbye.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        self.connection.settimeout(30.0)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def fill(self, timeout_s: float | None) -> bool:
        """Take in what has arrived, waiting for some up to ``timeout_s``; True at the end."""
        self.connection.settimeout(timeout_s)
        try:
            data = self.connection.recv(1 << 20)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            return True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            self._waiting += [json.loads(line) for line in lines if line]
        except ValueError:
            # Something else than an agent has found the port.
            return True
        return not data

    def taken(self) -> list[dict[str, Any]]:
        """The messages that have been taken in since."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message; None at the end or when the time is up."""
        return self._next(lambda message: True, timeout_s)

    def receive_with(self, key: str, timeout_s: float) -> dict[str, Any] | None:
        """The next message with a key; those before it are dropped."""
        return self._next(lambda message: key in message, timeout_s)

    def _next(self, wanted: Any, timeout_s: float | None) -> dict[str, Any] | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._waiting:
                message = self._waiting.pop(0)
                if wanted(message):
                    return message
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            if self.fill(left) and not self._waiting:
                return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


def clocks_differ(host: str, apart_s: float) -> str:
    """One line about a clock that is ahead (or, negative, behind)."""
    way = "ahead" if apart_s > 0 else "behind"
    return (
        f"{host}: its clock is {abs(apart_s):.0f} s {way}; start times there are off by that, "
        "durations are right; let chrony or NTP set it"
    )


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=10.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise AgentError(
                    f"{address}:{port}: no leader answers there ({error}); start the command with "
                    "launcher.node_rank=0 on that host"
                ) from error
            time.sleep(0.3)


def _why_refused(hello: dict[str, Any], token: str, missing: set[int]) -> str | None:
    if hello.get("token") != token:
        return "another run holds this endpoint; give both the same launcher.rdzv_id"
    if hello.get("version") != __version__:
        return (
            f"{hello.get('host')}: runs attnbench {hello.get('version')}, "
            f"the leader {__version__}; install the same on all nodes"
        )
    if hello.get("rank") not in missing:
        return f"{hello.get('host')}: its ranks are taken; is launcher.node_rank given twice?"
    return None
