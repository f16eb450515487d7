"""Anything at all between leaders and agents: no traceback, no hang, nobody kept out."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from agents import KEY, leader
from fault_folders import GUARD_S
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from harness.run.nodes import link
from harness.run.nodes.handshake import HandshakeError, Keys, Side, agent_side, leader_side
from harness.run.nodes.link import Link
from harness.run.nodes.messages import FROM_AGENT, FROM_LEADER
from harness.run.nodes.outcomes import OutcomeError, decode_outcome

FUZZ = fuzz(40)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)

HEX = st.text("0123456789abcdef", min_size=63, max_size=65)

OPENING_WORDS = st.dictionaries(
    st.sampled_from(["attnbench_link", "nonce", "proof", "refused", "token", "rank"]),
    HEX | VALUES | st.just(1),
    max_size=4,
)

LINES = st.one_of(
    st.binary(max_size=600),
    VALUES.map(lambda value: json.dumps(value).encode()),
    OPENING_WORDS.map(lambda value: json.dumps(value).encode()),
)

MESSAGES = st.one_of(
    VALUES,
    st.fixed_dictionaries(
        {"message": st.sampled_from(["event", "ended", "log", "killed", "hello", "start", "job"])},
        optional=dict.fromkeys(("event", "code", "log", "rank", "host", "run"), VALUES),
    ),
)


def told(side: Side, lines: list[bytes]) -> None:
    """Tell a side of a handshake some lines, none of which proves anything."""
    step = next(side)
    for line in lines:
        assert step.keys is None
        step = side.send(line)


@pytest.mark.parametrize("side", [agent_side, leader_side])
@given(lines=st.lists(LINES, min_size=3, max_size=4))
@FUZZ
def test_no_lines_make_a_handshake(side: Any, lines: list[bytes]) -> None:
    with pytest.raises(HandshakeError):
        told(side(KEY), lines)


@given(lines=st.lists(LINES, min_size=2, max_size=3))
@FUZZ
def test_nor_do_lines_after_a_right_beginning(lines: list[bytes]) -> None:
    opening = next(agent_side(KEY)).line
    assert opening is not None
    with pytest.raises(HandshakeError):
        told(leader_side(KEY), [opening, *lines])


def received(kinds: Any, chunks: list[bytes]) -> tuple[Link, list[Any]]:
    """What a link makes of bytes that arrive in chunks."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        heard = Link(ours, b"back", b"there", kinds)
        messages: list[Any] = []
        for chunk in chunks:
            theirs.sendall(chunk)
            heard.fill(GUARD_S)
            messages += heard.taken()
            if heard.broken:
                # It reads no more, and the socket would soon take no more.
                break
        return heard, messages


@pytest.fixture(autouse=True)
def any_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of sockets has none of TCP's options."""
    monkeypatch.setattr(link, "keep_alive", lambda connection: None)


@given(chunks=st.lists(st.binary(min_size=1, max_size=300), max_size=6))
@FUZZ
def test_bytes_are_no_messages(chunks: list[bytes]) -> None:
    heard, messages = received(FROM_AGENT, chunks)
    assert messages == []
    assert heard.broken == (b"\n" in b"".join(chunks))


@pytest.mark.parametrize("kinds", [FROM_AGENT, FROM_LEADER], ids=["from an agent", "from a leader"])
@given(values=st.lists(MESSAGES, max_size=4), cut=st.integers(1, 400))
@FUZZ
def test_what_is_signed_is_of_its_type_or_ends_the_link(
    kinds: Any, values: list[Any], cut: int
) -> None:
    texts = [json.dumps(value).encode() for value in values]
    lines = [
        link._mac(b"there", number, text) + b" " + text + b"\n" for number, text in enumerate(texts)
    ]
    data = b"".join(lines)
    heard, messages = received(kinds, [data[at : at + cut] for at in range(0, len(data), cut)])
    assert all(isinstance(message, kinds) for message in messages)
    assert heard.broken == (len(messages) < len(values))


@given(
    data=st.lists(MESSAGES, min_size=1, max_size=4),
    change=st.sampled_from(["flip", "drop", "swap", "repeat", "insert"]),
    where=st.integers(0, 10_000),
)
@FUZZ
def test_a_changed_stream_ends_where_it_was_changed(
    data: list[Any], change: str, where: int
) -> None:
    """Whoever is on the way can cut a link and not alter what it says."""
    keys = Keys(to_leader=b"there", to_agent=b"back")
    texts = [json.dumps({"message": "event", "event": {"value": value}}).encode() for value in data]
    lines = [
        link._mac(keys.to_leader, number, text) + b" " + text + b"\n"
        for number, text in enumerate(texts)
    ]
    at = where % len(lines)
    if change == "flip":
        line = bytearray(lines[at])
        line[where % (len(line) - 1)] ^= 1
        lines[at] = bytes(line)
    elif change == "drop":
        del lines[at]
    elif change == "swap":
        lines[at], lines[-1] = lines[-1], lines[at]
    elif change == "repeat":
        lines.insert(at, lines[at])
    else:
        lines.insert(at, b"0" * 64 + b" {}\n")
    _, messages = received(FROM_AGENT, lines)
    arrived = [json.dumps(msgspec.to_builtins(message)["event"]) for message in messages]
    sent = [json.dumps(json.loads(text)["event"]) for text in texts]
    assert arrived == sent[: len(arrived)]


def test_a_leader_lets_its_agent_in_whatever_strangers_send() -> None:
    @given(data=st.binary(max_size=2000) | st.lists(LINES, max_size=4).map(b"\n".join))
    @FUZZ
    def knock(data: bytes) -> None:
        with led.connect() as knocking, suppress(ConnectionError):
            knocking.sendall(data)
            knocking.shutdown(socket.SHUT_WR)
            while knocking.recv(4096):
                pass
        led.require_waiting()

    with leader() as led:
        knock()
        led.join()
        assert sorted(led.gathered.result(timeout=GUARD_S)._agents) == [1]


@given(
    data=st.binary(max_size=100)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from(["rank", "status", "samples_ms", "notes", "clocks", "check"]), VALUES
    ).map(lambda value: json.dumps(value).encode())
)
@FUZZ
def test_no_bytes_are_an_outcome(data: bytes) -> None:
    with pytest.raises(OutcomeError):
        decode_outcome(data, 1)
