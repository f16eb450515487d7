"""The leader's door: lets the agents of a run in, and drops everybody else.

Connections are heard side by side, each within a time and a length, and nothing that a stranger
sends or fails to send ends the run or keeps an agent waiting.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.run.nodes.complaints import Complaints
from harness.run.nodes.errors import HostError
from harness.run.nodes.handshake import (
    LINE_BYTES,
    NO_PROTOCOL,
    REFUSAL,
    HandshakeError,
    Side,
    WrongSecretError,
    leader_side,
)
from harness.run.nodes.link import Link
from harness.run.nodes.messages import Hello, Refused, Welcome

HANDSHAKE_S = 10.0
"""How long a connection may take to prove that it is an agent and to say which."""

MOST_WAITING = 128
"""Connections that are heard at a time; of more, the one that has come first is dropped."""

_PAUSE_S = 0.05


class Agent(NamedTuple):
    """An agent that has joined."""

    link: Link
    hello: Hello
    apart_s: float
    """Seconds by which its host's clock is ahead."""


@dataclass(slots=True)
class _Visitor:
    """A connection that has not joined."""

    connection: socket.socket
    peer: str
    until: float
    side: Side
    buffer: bytes = b""
    link: Link | None = None
    """After the handshake, while its hello is awaited."""


@dataclass(slots=True)
class Door:
    """Waits for the agents of ``ranks``.

    Args:
        judge: why an agent with the right secret cannot join, and whether that is a mistake of
            the user's which ends the run; None if it may join.
    """

    listener: socket.socket
    key: bytes
    ranks: set[int]
    judge: Callable[[Hello], tuple[str, bool] | None]
    joined: dict[int, Agent] = field(default_factory=dict)
    _visitors: dict[int, _Visitor] = field(default_factory=dict)
    _complaints: Complaints = field(default_factory=Complaints)
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)

    def gather(self, timeout_s: float) -> dict[int, Agent]:
        """The agents of all ranks; TimeoutError if some have not come in time."""
        deadline = time.monotonic() + timeout_s
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ, None)
        try:
            while self.missing:
                if time.monotonic() > deadline:
                    raise TimeoutError
                for key, _ in self._selector.select(self._wait_s(deadline)):
                    if key.data is None:
                        self._open()
                    elif isinstance(key.data, int):
                        self._look_after(key.data)
                    # One that was dropped meanwhile has no file descriptor any more.
                    elif key.data.connection.fileno() >= 0:
                        self._hear(key.data)
                self._show_out()
        except BaseException:
            for agent in self.joined.values():
                agent.link.close()
            raise
        finally:
            for visitor in list(self._visitors.values()):
                self._forget(visitor)
                visitor.connection.close()
            self._selector.close()
            self._complaints.close()
        return self.joined

    @property
    def missing(self) -> set[int]:
        return self.ranks - set(self.joined)

    def _wait_s(self, deadline: float) -> float:
        first = min([deadline, *(visitor.until for visitor in self._visitors.values())])
        return max(0.0, first - time.monotonic()) + 0.01

    def _open(self) -> None:
        try:
            connection, address = self.listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # It has gone already, or this process has no file descriptor left.
            time.sleep(_PAUSE_S)
            return
        connection.setblocking(False)
        if len(self._visitors) >= MOST_WAITING:
            self._drop(next(iter(self._visitors.values())), "too many came after it")
        until = time.monotonic() + HANDSHAKE_S
        visitor = _Visitor(connection, f"{address[0]}:{address[1]}", until, leader_side(self.key))
        next(visitor.side)
        self._visitors[connection.fileno()] = visitor
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: _Visitor) -> None:
        if visitor.link is not None:
            visitor.link.fill(0.0)
        else:
            try:
                data = visitor.connection.recv(4096)
            except BlockingIOError:
                return
            except OSError as error:
                self._drop(visitor, f"it broke off ({error.strerror})")
                return
            if not data:
                self._drop(visitor, "it hung up without a word of attnbench's protocol")
                return
            visitor.buffer += data
            try:
                self._shake_hands(visitor)
            except WrongSecretError as error:
                with contextlib.suppress(OSError):
                    _send(visitor, REFUSAL)
                self._drop(visitor, f"{error} than this run's")
                return
            except (HandshakeError, OSError) as error:
                self._drop(visitor, str(error))
                return
        if visitor.link is not None:
            self._greet(visitor, visitor.link)

    def _shake_hands(self, visitor: _Visitor) -> None:
        while visitor.link is None and b"\n" in visitor.buffer:
            line, _, visitor.buffer = visitor.buffer.partition(b"\n")
            if len(line) > LINE_BYTES:
                raise HandshakeError(NO_PROTOCOL)
            step = visitor.side.send(line)
            assert step.line is not None, "the leader answers every line"
            _send(visitor, step.line)
            if step.keys is not None:
                visitor.link = Link.of_leader(visitor.connection, step.keys, visitor.buffer)
        if visitor.link is None and len(visitor.buffer) > LINE_BYTES:
            raise HandshakeError(NO_PROTOCOL)

    def _greet(self, visitor: _Visitor, link: Link) -> None:
        """Let an agent in that has said hello."""
        messages = link.taken()
        if not messages:
            if link.broken:
                self._drop(visitor, "it broke off")
            return
        hello = messages[0]
        if len(messages) > 1 or not isinstance(hello, Hello):
            self._drop(visitor, "its first message was no hello")
            return
        self._forget(visitor)
        link.host = hello.host
        refused = self.judge(hello)
        if refused is None and hello.rank not in self.missing:
            refused = f"{hello.host}: its ranks are taken; is launcher.node_rank given twice?", True
        try:
            link.send(Welcome() if refused is None else Refused(reason=refused[0]))
        except OSError:
            link.close()
            return
        if refused is None:
            self.joined[hello.rank] = Agent(link, hello, hello.time_s - time.time())
            self._selector.register(link, selectors.EVENT_READ, hello.rank)
            return
        link.close()
        reason, ends_run = refused
        if ends_run:
            raise HostError(reason)
        self._complaints.add(f"{visitor.peer} was sent away: {reason}")

    def _look_after(self, rank: int) -> None:
        """Wait for a rank again whose agent has gone before the others came."""
        link, hello, _ = self.joined[rank]
        if link.fill(0.0) or link.taken():
            self._selector.unregister(link)
            link.close()
            del self.joined[rank]
            self._complaints.add(f"{hello.host}: the agent of rank {rank} has gone; waiting again")

    def _show_out(self) -> None:
        """Drop those whose time is up."""
        now = time.monotonic()
        for visitor in [item for item in self._visitors.values() if item.until < now]:
            self._drop(visitor, f"it said nothing useful for {HANDSHAKE_S:.0f} s")

    def _drop(self, visitor: _Visitor, why: str) -> None:
        self._forget(visitor)
        visitor.connection.close()
        self._complaints.add(f"{visitor.peer} was dropped: {why}")

    def _forget(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection.fileno()]


def _send(visitor: _Visitor, line: bytes) -> None:
    """Send a short line to a connection that has nothing waiting; OSError if it cannot take it."""
    if visitor.connection.send(line + b"\n") <= len(line):
        raise ConnectionAbortedError("it does not read")
