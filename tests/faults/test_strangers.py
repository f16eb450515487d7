"""Strangers at a leader's port, before and after its agents have joined."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from agents import KEY, Led, hello, leader, wait_for
from fault_folders import GUARD_S

from harness.run.children.rank import RankStart
from harness.run.nodes import complaints, door, entry, link
from harness.run.nodes.address import listen, split_endpoint, warning_about
from harness.run.nodes.errors import HostError
from harness.run.nodes.handshake import REFUSAL, Keys, agent_side
from harness.run.nodes.hosts import Hosts, RemoteRank
from harness.run.nodes.link import Link
from harness.run.nodes.messages import Ended, Event, LogLines, Start, ToLeader

Stranger = Callable[[Led, ExitStack], None]


def reset(led: Led, stack: ExitStack) -> None:
    with led.connect() as knocking:
        knocking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def hang_up(led: Led, stack: ExitStack) -> None:
    led.connect().close()


def silent(led: Led, stack: ExitStack) -> None:
    stack.enter_context(led.connect())


def many_silent(led: Led, stack: ExitStack) -> None:
    for _ in range(2 * door.MOST_WAITING):
        silent(led, stack)


def saying(data: bytes) -> Stranger:
    """Says something and waits until the leader hangs up."""

    def stranger(led: Led, stack: ExitStack) -> None:
        with led.connect() as knocking, suppress(ConnectionError):
            knocking.sendall(data)
            while knocking.recv(4096):
                pass

    return stranger


def half_a_line(led: Led, stack: ExitStack) -> None:
    stack.enter_context(led.connect()).sendall(b'{"attnbench_li')


def without_end(led: Led, stack: ExitStack) -> None:
    """100 MB without a newline, of which the leader takes next to nothing."""
    with led.connect() as knocking, pytest.raises(ConnectionError):
        knocking.sendall(b"x" * 100_000_000)


def opening() -> bytes:
    step = next(agent_side(KEY))
    assert step.line is not None
    return step.line + b"\n"


def guessing(led: Led, stack: ExitStack) -> None:
    """Speaks the protocol and knows another secret."""
    with pytest.raises(HostError, match=r"has another secret.*launcher\.rdzv_secret"):
        led.join(key=b"a guess")


def of_another_run(led: Led, stack: ExitStack) -> None:
    with pytest.raises(HostError, match=r"another run holds this endpoint.*launcher\.rdzv_id"):
        led.join(run="theirs")


STRANGERS: dict[str, Stranger] = {
    "connects and resets": reset,
    "connects and hangs up": hang_up,
    "the line 5": saying(b"5\n"),
    "null": saying(b"null\n"),
    "an object": saying(b"{}\n"),
    "the old token": saying(b'{"token": "attnbench"}\n'),
    "an old agent": saying(
        b'{"rank": 1, "token": "attnbench", "host": "x", "version": "0.1.0", "time_s": 1.0}\n'
    ),
    "a browser": saying(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "junk": saying(bytes(range(256)) * 4),
    "nested": saying(b"[" * 400 + b"\n"),
    "no text": saying(b"\xff\xfe\n"),
    "a long line": saying(b'{"a": "' + b"x" * 10_000 + b'"}\n'),
    "a nonce of a wrong type": saying(b'{"attnbench_link": 1, "nonce": 5}\n'),
    "another protocol": saying(b'{"attnbench_link": 2, "nonce": "' + b"0" * 64 + b'"}\n'),
    "a right beginning": saying(opening() + b"5\n"),
    "a wrong proof": saying(opening() + b'{"proof": "' + b"0" * 64 + b'"}\n'),
    "a proof with a wide letter": saying(opening() + '{"proof": "é"}\n'.encode()),
    "without an end": without_end,
    "half a line": half_a_line,
    "says nothing": silent,
    "many that say nothing": many_silent,
    "another secret": guessing,
    "another run": of_another_run,
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_neither_ends_a_run_nor_keeps_it_waiting(
    stranger: Stranger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than this test may take: who says nothing is not waited for.
    monkeypatch.setattr(door, "HANDSHAKE_S", 2 * GUARD_S)
    with ExitStack() as stack, leader() as led:
        stranger(led, stack)
        led.require_waiting()
        led.join()
        assert sorted(led.gathered.result(timeout=GUARD_S)._agents) == [1]
    said = capsys.readouterr().err.splitlines()
    dropped = [line for line in said if "was dropped: " in line or "was sent away: " in line]
    expected = 0 if stranger in (silent, half_a_line) else 1
    assert expected <= len(dropped) <= complaints.AT_ONCE
    assert all(line.startswith("attnbench: 127.0.0.1:") for line in dropped)


def test_who_says_nothing_is_dropped_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.05)
    with leader() as led:
        with led.connect() as knocking:
            assert knocking.recv(1) == b""
        monkeypatch.setattr(door, "HANDSHAKE_S", GUARD_S)
        led.join()
    assert "said nothing useful" in capsys.readouterr().err


def test_a_flood_is_counted_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with leader() as led:
        for _ in range(60):
            saying(b"5\n")(led, ExitStack())
        led.join()
    said = capsys.readouterr().err.splitlines()
    assert len(said) <= complaints.AT_ONCE + 3
    assert said[-1] == f"attnbench: {60 - complaints.AT_ONCE} more were dropped"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.0.0"}, "n1: runs attnbench 0.0.0, .*install the same on all nodes"),
        ({"rank": 0}, "n0: its ranks are taken; is launcher.node_rank given twice"),
        ({"rank": 7}, "n7: has rank 7, and this run has 2; give launcher.nnodes"),
    ],
)
def test_a_mistake_of_the_users_ends_both(changes: dict[str, object], words: str) -> None:
    with leader() as led:
        with pytest.raises(HostError, match=words):
            led.join(**changes)
        with pytest.raises(HostError, match=words):
            led.gathered.result(timeout=GUARD_S)


def test_a_node_given_twice() -> None:
    with leader(world_size=3) as led:
        first = led.join(1)
        with pytest.raises(HostError, match="n1: its ranks are taken"):
            led.join(1)
        with pytest.raises(HostError, match="n1: its ranks are taken"):
            led.gathered.result(timeout=GUARD_S)
        assert first.receive(GUARD_S) is None


def test_an_agent_that_goes_before_the_others_came_is_waited_for_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = ""

    def gone() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "the agent of rank 1 has gone" in said

    with leader(world_size=3) as led:
        led.join(1).close()
        wait_for(gone)
        links = [led.join(1), led.join(2)]
        assert sorted(led.gathered.result(timeout=GUARD_S)._agents) == [1, 2]
        assert all(isinstance(link, Link) for link in links)


def test_agents_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.run.nodes.hosts.CONNECT_TIMEOUT_S", 1.0)
    with leader(world_size=3) as led:
        agent = led.join(2)
        with pytest.raises(HostError, match="no agent of ranks 1 came to port"):
            led.gathered.result(timeout=GUARD_S)
        assert agent.receive(GUARD_S) is None


@contextmanager
def false_leader(data: bytes | None) -> Iterator[int]:
    """Listens where an agent expects its leader; answers with ``data``, or not at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = stack.enter_context(listener.accept()[0])
                    if data is not None:
                        connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


CHALLENGE = json.dumps({"nonce": "0" * 64}).encode() + b"\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "is no leader of this run: it does not speak attnbench's"),
        (b"x" * 1_000_000, "is no leader of this run: it does not speak attnbench's"),
        (b'{"welcome": true}\n', "is no leader of this run: it does not speak attnbench's"),
        (CHALLENGE + b'{"proof": "' + b"0" * 64 + b'"}\n', "has another secret"),
        (CHALLENGE + REFUSAL + b"\n", "has another secret"),
        (CHALLENGE + b"{}\n", "is no leader of this run"),
        (None, "no leader answers there"),
    ],
)
def test_a_stranger_is_no_leader(
    answer: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds the leader's port learns no secret and starts nothing."""
    monkeypatch.setattr(entry, "ANSWER_S", 0.2 if answer is None else GUARD_S)
    with false_leader(answer) as port, pytest.raises(HostError, match=words):
        entry.enter("127.0.0.1", port, KEY, hello(), timeout_s=0.5 if answer is None else GUARD_S)


class TestAddress:
    def test_a_leader_listens_on_the_address_that_it_was_given(self) -> None:
        with leader() as led:
            led.connect().close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", led.port), timeout=GUARD_S)
            led.join()

    def test_an_address_of_another_host(self) -> None:
        with pytest.raises(HostError, match=r"port 29500 of 192\.0\.2\.1 cannot be listened on"):
            listen("192.0.2.1", 29500)

    def test_a_port_that_another_program_has(self) -> None:
        with listen("127.0.0.1", 0) as taken, pytest.raises(HostError, match="name a free port"):
            listen("127.0.0.1", taken.getsockname()[1])

    def test_a_name_that_means_this_machine_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As Debian writes it into /etc/hosts."""
        with listen("127.0.0.1", 0) as listener:
            warning = warning_about("node7", listener)
            assert warning is not None
            assert warning.startswith("node7 is 127.0.0.1 here, which other hosts cannot reach")
            assert warning_about("localhost", listener) is None
            assert warning_about("127.0.0.1", listener) is None

    @pytest.mark.parametrize(
        ("text", "split"),
        [
            ("host:29500", ("host", 29500)),
            ("[::1]:29500", ("::1", 29500)),
            ("host:0", None),
            ("host:65536", None),
            ("host:²", None),
            (":29500", None),
            ("29500", None),
            (None, None),
        ],
    )
    def test_endpoints(self, text: str | None, split: tuple[str, int] | None) -> None:
        assert split_endpoint(text) == split


@contextmanager
def joined() -> Iterator[tuple[RemoteRank, Link, socket.socket]]:
    """A rank behind an agent as its leader sees it, the agent's link, and its socket."""
    keys = Keys(to_leader=b"there", to_agent=b"back")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    hosts = Hosts(local_ranks=1, ranks_per_node=1)
    with theirs, ours:
        hosts._agents[1] = Link.of_leader(ours, keys)
        hosts._agents[1].host = "n1"
        values = {"rank": 1, "local_rank": 0, "ranks_on_host": 1, "world_size": 2}
        limits = {"vote_timeout_s": 1.0, "timeout_s": 1.0}
        start = RankStart(**values, **limits, device="cpu", rendezvous="")  # type: ignore[arg-type]
        rank = RemoteRank(hosts._agents[1], start)
        agent = Link.of_agent(theirs, keys)
        assert isinstance(agent.receive(GUARD_S), Start)
        yield rank, agent, theirs


def read_until_closed(rank: RemoteRank) -> list[dict[str, object]]:
    events: list[dict[str, object]] = []
    ended = False
    until_s = time.monotonic() + GUARD_S
    while not ended:
        assert time.monotonic() < until_s, "the link goes on"
        rank._link.connection.settimeout(GUARD_S)
        found, ended = rank.read()
        events += found
    return events


class TestAfterJoining:
    def sent(self, agent: Link, text: bytes) -> bytes:
        """A line with a right proof, whatever it says."""
        line = link._mac(agent.sending_key, agent._num_sent, text) + b" " + text + b"\n"
        agent._num_sent += 1
        return line

    @pytest.mark.parametrize(
        "text",
        [
            *(b"5", b"null", b"[]", b"{}", b"junk", b"\xff", b"[" * 100_000),
            *(b'{"message": "event"}', b'{"message": "event", "event": 5}', b'{"message": "x"}'),
            *(b'{"message": "event", "event": {}, "more": 1}', b'{"message": ["event"]}'),
            b'{"message": "ended", "code": "0", "log": []}',
            b'{"message": "start", "start": {}}',
            b"1" * 10_000,
        ],
    )
    def test_no_message_ends_this_link_alone(self, text: bytes) -> None:
        with joined() as (rank, agent, theirs):
            agent.send(Event(event={"event": "stage", "stage": "warm-up"}))
            theirs.sendall(self.sent(agent, text))
            assert read_until_closed(rank) == [{"event": "stage", "stage": "warm-up"}]
            assert rank.log_lines(20) == ["node n1 has gone"]
            assert rank.returncode(0.0) is None
            rank.kill()
            rank.reap()

    def test_a_message_without_an_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link, "MESSAGE_BYTES", 100_000)
        with joined() as (rank, _, theirs):
            theirs.sendall(b"x" * 200_000)
            assert read_until_closed(rank) == []
            assert rank.log_lines(20) == ["node n1 has gone"]

    def test_a_message_of_another_is_not_heard(self) -> None:
        with joined() as (rank, _, theirs):
            text = b'{"message": "event", "event": {}}'
            theirs.sendall(link._mac(b"a guess", 0, text) + b" " + text + b"\n")
            assert read_until_closed(rank) == []

    def test_a_message_that_is_repeated_is_not_heard_again(self) -> None:
        with joined() as (rank, agent, theirs):
            line = self.sent(agent, b'{"message": "event", "event": {}}')
            theirs.sendall(line + line)
            assert read_until_closed(rank) == [{}]

    def test_a_message_of_ours_is_not_heard_as_theirs(self) -> None:
        with joined() as (rank, agent, theirs):
            text = b'{"message": "event", "event": {}}'
            theirs.sendall(link._mac(agent.receiving_key, 0, text) + b" " + text + b"\n")
            assert read_until_closed(rank) == []

    def test_a_message_that_is_too_long_to_send_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "MESSAGE_BYTES", 1000)
        with joined() as (_, agent, _), pytest.raises(ConnectionAbortedError, match="bytes cannot"):
            agent.send(Event(event={"text": "x" * 1000}))

    @pytest.mark.parametrize(
        "message",
        [
            Event(event={"nan": float("nan"), "half": "\ud800", "deep": [{"a": [None]}]}),
            Event(event={"samples": [0.5] * 100_000}),
            LogLines(log=["", "\x1b[31m\ud800"]),
            Ended(code=None, log=[]),
        ],
    )
    def test_what_workers_say_arrives_as_it_was(self, message: ToLeader) -> None:
        with joined() as (rank, agent, _):
            thread = threading.Thread(target=agent.send, args=(message,))
            thread.start()
            assert repr(rank._link.receive(GUARD_S)) == repr(message)
            thread.join()
