"""Hosts that hang: their agents take nothing that is sent, or never answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from accounting_cases import case_of
from fault_folders import GUARD_S, wait_until

from harness.run.children import deadline
from harness.run.children.rank import RankStart
from harness.run.children.reply import Reply
from harness.run.nodes import agent as agent_module
from harness.run.nodes import hosts as hosts_module
from harness.run.nodes import link as link_module
from harness.run.nodes.handshake import Keys
from harness.run.nodes.hosts import Hosts, RemoteRank
from harness.run.nodes.link import Link
from harness.run.nodes.messages import Event, Job, Kill, Killed, LogLines, Start, WantLog
from harness.run.workers.worker_group import WorkerGroup, WorkerStartError

LONG = "x" * (32 << 20)
"""More than sockets hold."""

PATIENCE_S = 0.2


class Agents:
    """The agents of two ranks without their workers, and the leader's hosts."""

    def __init__(self, stack: ExitStack) -> None:
        self.hosts = Hosts(local_ranks=0, ranks_per_node=1)
        self.hosts._address = "127.0.0.1"
        self.links = [self._joined(rank, stack) for rank in range(2)]
        self.heard: list[str] = []
        """What an agent that works was told, by type."""
        self.threads: list[threading.Thread] = []

    def _joined(self, rank: int, stack: ExitStack) -> Link:
        keys = Keys(to_leader=b"there", to_agent=b"back")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = stack.enter_context(socket.create_connection(listener.getsockname()))
            ours = stack.enter_context(listener.accept()[0])
        self.hosts._agents[rank] = Link.of_leader(ours, keys)
        self.hosts._agents[rank].host = f"n{rank}"
        return Link.of_agent(theirs, keys)

    def remote(self, rank: int) -> RemoteRank:
        values = {"rank": rank, "local_rank": 0, "ranks_on_host": 1, "world_size": 2}
        limits = {"vote_timeout_s": 1.0, "timeout_s": 1.0}
        start = RankStart(**values, **limits, device="cpu", rendezvous="")  # type: ignore[arg-type]
        return RemoteRank(self.hosts._agents[rank], start)

    def work(self, rank: int) -> None:
        """Answer as an agent with a worker does that begins with every job and ends none."""
        thread = threading.Thread(target=self._answer, args=(self.links[rank],))
        thread.start()
        self.threads.append(thread)

    def _answer(self, link: Link) -> None:
        with suppress(OSError):
            while (order := link.receive(None)) is not None:
                self.heard.append(type(order).__name__)
                if isinstance(order, Start):
                    link.send(Event(event={"event": "ready", "environment": {}}))
                elif isinstance(order, Job):
                    link.send(Event(event={"event": "began", "job": 1}))
                    link.send(Event(event={"event": "stage", "job": 1, "stage": "warm-up"}))
                elif isinstance(order, WantLog):
                    link.send(LogLines(log=["a line"]))
                elif isinstance(order, Kill):
                    link.send(Killed())

    def hang_when_ready(self, rank: int) -> None:
        """Say that a worker is ready, and never read again."""
        self.links[rank].send(Event(event={"event": "ready", "environment": {}}))

    def take_what_came(self, rank: int) -> None:
        """Take from the socket what is there, as a slow agent does."""
        with suppress(BlockingIOError):
            while True:
                self.links[rank].connection.recv(1 << 20)

    def group(self, results: Path) -> WorkerGroup:
        limits: dict[str, Any] = {"timeout_s": 1.0, "vote_timeout_s": 1.0}
        return WorkerGroup(
            device="cpu", world_size=2, results=results, caches="", hosts=self.hosts, **limits
        )


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(link_module, "LEADER_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(hosts_module, "KILL_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(hosts_module, "LOG_WAIT_S", PATIENCE_S)
    with ExitStack() as stack:
        agents = Agents(stack)
        yield agents
        for link in agents.hosts._agents.values():
            # Closing alone wakes nobody who reads in another thread.
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_RDWR)
        for thread in agents.threads:
            thread.join()


CASE = case_of("attention=naive")


def run(group: WorkerGroup, timeout_s: float, stages: list[str]) -> Reply:
    terms: dict[str, Any] = {"rounds": 1, "round_index": 0, "until_decided": False}
    return group.run(CASE, **terms, timeout_s=timeout_s, on_stage=stages.append)


def read_until(rank: RemoteRank, *, closed: bool) -> list[dict[str, Any]]:
    """What a rank says until there is something, or until its end."""
    events: list[dict[str, Any]] = []
    ended = False
    until_s = time.monotonic() + GUARD_S
    while not (ended if closed else events):
        assert time.monotonic() < until_s, "it is not given up, or not heard"
        found, ended = rank.read()
        events += found
        time.sleep(0.01)
    return events


class TestLinks:
    def test_a_host_that_takes_nothing_keeps_no_other_waiting(self, agents: Agents) -> None:
        hung, other = agents.remote(1), agents.remote(0)
        waits = [link.connection.gettimeout() for link in agents.hosts._agents.values()]
        assert waits == [0, 0], "a send never waits"
        hung.send(LONG)
        agents.work(0)
        other.send("{}")
        assert len(read_until(other, closed=False)) > 0
        assert not hung.closed
        assert read_until(hung, closed=True) == []
        assert hung.gone == f"on n1 took nothing for {PATIENCE_S:g} s"
        assert hung.log_lines(20) == [f"node n1 took nothing for {PATIENCE_S:g} s"]
        assert not other.closed
        hung.kill()
        hung.reap()

    def test_a_host_that_takes_it_late_is_not_given_up(self, agents: Agents) -> None:
        rank = agents.remote(1)
        agents.hosts._agents[1].patience_s = GUARD_S
        rank.send(LONG)
        agents.work(1)
        read_until(rank, closed=False)
        rank.send("{}")
        read_until(rank, closed=False)
        assert agents.heard[:2] == ["Start", "Job"]

    def test_a_host_that_takes_it_slowly_is_not_given_up(
        self, agents: Agents, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Less than its patience passes from piece to piece, and more of it in all."""
        now_s = [100.0]
        monkeypatch.setattr(deadline.time, "monotonic", lambda: now_s[0])
        rank, link = agents.remote(1), agents.hosts._agents[1]
        rank.send(LONG)
        for _ in range(4):
            before = link.unsent_bytes
            now_s[0] += 0.8 * PATIENCE_S
            agents.take_what_came(1)
            assert rank.read() == ([], False)
            assert link.unsent_bytes < before
        now_s[0] += 1.2 * PATIENCE_S
        assert rank.read() == ([], True)

    def test_a_host_that_talks_all_the_time_is_sent_what_waits(self, agents: Agents) -> None:
        rank, link = agents.remote(1), agents.hosts._agents[1]
        rank.send(LONG)
        before = link.unsent_bytes
        agents.take_what_came(1)
        agents.hang_when_ready(1)
        assert len(read_until(rank, closed=False)) == 1
        assert link.unsent_bytes < before

    def test_an_agent_waits_for_a_leader_that_is_stopped(self, agents: Agents) -> None:
        """For longer than a leader waits for an agent."""
        rank = agents.remote(1)
        agent = agents.links[1]
        agent.send(Event(event={"text": LONG}))
        until_s = time.monotonic() + 2 * PATIENCE_S
        while time.monotonic() < until_s:
            assert not agent.fill(0.01)
        assert agent.unsent_bytes > 0
        thread = threading.Thread(target=agent.receive_one, args=(Kill, GUARD_S))
        thread.start()
        agents.threads.append(thread)
        assert read_until(rank, closed=False) == [{"text": LONG}]
        rank.kill()


class Talking:
    """A worker that has always something to say, and is heard only while its leader takes it."""

    closed = False

    def __init__(self, link: Link, readable: socket.socket) -> None:
        self.fileno = readable.fileno
        self._link = link

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        assert self._link.unsent_bytes <= agent_module.MOST_UNSENT_BYTES
        return [{"text": "x" * (1 << 20)}], False

    def kill(self) -> None: ...

    def reap(self) -> None: ...


def test_an_agent_keeps_a_worker_waiting_that_says_more_than_its_leader_takes(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "MOST_UNSENT_BYTES", 1 << 20)
    rank, link = agents.remote(1), agents.links[1]
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        theirs.send(b"x")
        worker: Any = Talking(link, ours)
        passed = pool.submit(agent_module._pass_on, link, worker)

        def is_full() -> bool:
            return passed.done() or link.unsent_bytes > agent_module.MOST_UNSENT_BYTES

        for _ in range(2):
            wait_until(is_full, "the leader has taken nothing for a while")
            read_until(rank, closed=False)
        wait_until(is_full, "the agent goes on")
        rank.kill()
        assert passed.result(GUARD_S)


class TestGroups:
    def test_a_rank_that_hangs_is_lost_and_the_others_are_heard(
        self, agents: Agents, tmp_path: Path
    ) -> None:
        agents.work(0)
        agents.hang_when_ready(1)
        group = agents.group(tmp_path)
        agents.hosts._agents[1].send(Job(line=LONG))
        stages: list[str] = []
        reply = run(group, GUARD_S, stages)
        assert reply.lost == f"rank 1 on n1 took nothing for {PATIENCE_S:g} s before the case began"
        assert stages == ["warm-up"]
        assert "rank 0 (on n0):\na line" in group.log_tail()
        group.close()
        assert agents.heard == ["Start", "Job", "WantLog", "Kill"]
        with pytest.raises(WorkerStartError, match="rank 1: n1 took nothing for"):
            agents.group(tmp_path)

    def test_a_rank_that_sends_no_log_is_asked_once(self, agents: Agents) -> None:
        """What it sends once it goes on would be taken for another answer."""
        rank = agents.remote(1)
        assert rank.log_lines(20) == [f"node n1 did not send its log for {PATIENCE_S:g} s"]
        assert agents.hosts._agents[1].broken
        assert rank.read() == ([], True)

    def test_a_rank_that_never_answers_is_not_started_again(
        self, agents: Agents, tmp_path: Path
    ) -> None:
        """What it says of its last worker, once it goes on, is nobody's."""
        agents.work(0)
        agents.hang_when_ready(1)
        group = agents.group(tmp_path)
        reply = run(group, PATIENCE_S, [])
        assert reply.lost == "rank 1 did not answer within timeout_s=0.2 before the case began"
        group.close()
        with pytest.raises(WorkerStartError, match="rank 1: n1 did not end its worker for"):
            agents.group(tmp_path)

    @pytest.mark.parametrize("wait", ["log_tail", "close"])
    def test_waits_for_hosts_that_hang_do_not_add_up(
        self, wait: str, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each wait ends where that for the first host ends, and reads what has come by then."""
        waits_s: list[float] = []
        receive_one = Link.receive_one

        def noted(link: Link, kind: type[Any], timeout_s: float) -> Any:
            waits_s.append(timeout_s)
            return receive_one(link, kind, timeout_s)

        monkeypatch.setattr(Link, "receive_one", noted)
        agents.hang_when_ready(0)
        agents.hang_when_ready(1)
        group = agents.group(tmp_path)
        getattr(group, wait)()
        assert [wait_s <= 0.01 for wait_s in waits_s] == [False, True]
        group.close()

    def test_an_answer_that_came_while_another_host_was_waited_for(
        self, agents: Agents, tmp_path: Path
    ) -> None:
        agents.hang_when_ready(0)
        agents.work(1)
        group = agents.group(tmp_path)
        run(group, PATIENCE_S, [])
        tail = group.log_tail()
        assert f"node n0 did not send its log for {PATIENCE_S:g} s" in tail
        assert "rank 1 (on n1):\na line" in tail
        group.close()
        assert not agents.hosts._agents[1].broken
