"""A connection between two hosts: typed messages, each authenticated and limited in length.

A message is one line: an HMAC-SHA256 over its number and its text, a blank, and its text, which
is one JSON object. Numbers count from 0 in each direction, so that a message that was changed,
left out, repeated or put in from outside ends the link. Messages are not encrypted.

Sending never waits: what the other end does not take yet is kept and goes whenever something is
read, so that a host which hangs delays nobody but itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from harness.run.children.deadline import POLL_S, Deadline
from harness.run.nodes.handshake import Keys
from harness.run.nodes.messages import FROM_AGENT, FROM_LEADER

MESSAGE_BYTES = 64 << 20
"""The longest message; a result of thousands of passes on eight ranks has a hundredth of it."""

LEADER_PATIENCE_S = 30.0
"""How long an agent may take nothing of what was sent to it, before its leader gives it up. An
agent waits for as long as its connection lasts: its leader may be stopped (Ctrl-Z) and go on."""

GONE = "has gone"

_MAC_BYTES = 64

M = TypeVar("M", bound=msgspec.Struct)


@dataclass(slots=True)
class Link:
    """A connection to a host of this run.

    Args:
        kinds: the messages that may come.
        host: the other end's name, for messages to the user.
        patience_s: how long the other end may take nothing of what waits for it; None is for ever.
    """

    connection: socket.socket
    sending_key: bytes
    receiving_key: bytes
    kinds: Any
    host: str = ""
    patience_s: float | None = None
    broken: bool = False
    """Whether something came, or went, that leaves nothing to go on with."""
    why_broken: str = GONE
    """What the other end has done then, as a verb."""
    _unsent: bytearray = field(default_factory=bytearray)
    _give_up: Deadline | None = None
    """When to, while the other end takes nothing."""
    _buffer: bytearray = field(default_factory=bytearray)
    _searched: int = 0
    """Bytes at the buffer's front that hold no end of a line."""
    _waiting: list[Any] = field(default_factory=list)
    _num_sent: int = 0
    _num_received: int = 0

    def __post_init__(self) -> None:
        keep_alive(self.connection)
        self.connection.setblocking(False)

    @classmethod
    def of_leader(cls, connection: socket.socket, keys: Keys, rest: bytes = b"") -> Link:
        """The leader's end; ``rest`` is what came behind the handshake."""
        link = cls(connection, keys.to_agent, keys.to_leader, FROM_AGENT)
        link.patience_s = LEADER_PATIENCE_S
        link._take(rest)
        return link

    @classmethod
    def of_agent(cls, connection: socket.socket, keys: Keys, rest: bytes = b"") -> Link:
        """The agent's end."""
        link = cls(connection, keys.to_leader, keys.to_agent, FROM_LEADER)
        link._take(rest)
        return link

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message, or keep what cannot go yet; OSError if the link has ended."""
        # Events may hold NaN and lone surrogates, which Python's JSON carries and msgspec's not.
        text = json.dumps(msgspec.to_builtins(message)).encode()
        if len(text) > MESSAGE_BYTES:
            raise ConnectionAbortedError(f"a message of {len(text)} bytes cannot be sent")
        mac = _mac(self.sending_key, self._num_sent, text)
        self._num_sent += 1
        self._unsent += mac + b" " + text + b"\n"
        self._send_rest()
        if self.broken:
            raise ConnectionAbortedError(f"{self.host or 'the other end'} {self.why_broken}")

    @property
    def unsent_bytes(self) -> int:
        """What the other end has not taken yet."""
        return len(self._unsent)

    def give_up(self, why: str) -> None:
        """End the link, because the other end does not do what it should."""
        if not self.broken:
            self.broken, self.why_broken = True, why

    def _send_rest(self) -> None:
        try:
            while self._unsent and not self.broken:
                del self._unsent[: self.connection.send(self._unsent)]
                self._give_up = None
        except (BlockingIOError, TimeoutError):
            self._lose_patience()
        except OSError:
            # Perhaps half of it has gone.
            self.broken = True

    def _lose_patience(self) -> None:
        if self.patience_s is None:
            return
        if self._give_up is None:
            self._give_up = Deadline(self.patience_s)
        elif not self._give_up.left_s():
            self.give_up(f"took nothing for {self.patience_s:g} s")

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until something can be read, or sent of what is kept."""
        if self._unsent and self._give_up is not None:
            timeout_s = POLL_S if timeout_s is None else min(timeout_s, POLL_S)
        poll = select.poll()
        poll.register(self.connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(None if timeout_s is None else 1000 * timeout_s)

    def fill(self, timeout_s: float | None) -> bool:
        """Read what has arrived and send what is kept, waiting up to ``timeout_s`` for either.

        Returns True if the link has ended.
        """
        if self.broken:
            return True
        try:
            if timeout_s != 0:
                self._wait(timeout_s)
            # Reading comes first: what came before the end of a link is heard.
            data = self.connection.recv(1 << 20)
        except (BlockingIOError, TimeoutError):
            self._send_rest()
            return self.broken
        except OSError:
            self.broken = True
            return True
        self._take(data)
        self.broken = self.broken or not data
        self._send_rest()
        return self.broken

    def taken(self) -> list[Any]:
        """The messages read since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def receive(self, timeout_s: float | None) -> Any:
        """The next message; None if the link ends or the time is up."""
        return self._next(msgspec.Struct, timeout_s)

    def receive_one(self, kind: type[M], timeout_s: float) -> M | None:
        """The next message of a kind; earlier ones are dropped."""
        found: M | None = self._next(kind, timeout_s)
        return found

    def close(self) -> None:
        self.broken = True
        with contextlib.suppress(OSError):
            self.connection.close()

    def _take(self, data: bytes) -> None:
        self._buffer += data
        while not self.broken:
            end = self._buffer.find(b"\n", self._searched)
            if end < 0:
                self._searched = len(self._buffer)
                self.broken = self._searched > _MAC_BYTES + 1 + MESSAGE_BYTES
                return
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched = 0
            message = self._opened(line)
            if message is None:
                self.broken = True
                return
            self._waiting.append(message)

    def _opened(self, line: bytes) -> Any:
        """The message in a line; None if it is not one of the other end's."""
        mac, text = line[:_MAC_BYTES], line[_MAC_BYTES + 1 :]
        if not hmac.compare_digest(mac, _mac(self.receiving_key, self._num_received, text)):
            return None
        self._num_received += 1
        try:
            return msgspec.convert(json.loads(text), self.kinds)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return None

    def _next(self, kind: type[Any], timeout_s: float | None) -> Any:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ended = False
        while True:
            while self._waiting:
                message = self._waiting.pop(0)
                if isinstance(message, kind):
                    return message
            if ended:
                return None
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            # What has come by now is read although the time is up.
            ended = self.fill(left) or left == 0


def keep_alive(connection: socket.socket) -> None:
    """Notice a host that loses power, which does not close its connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _mac(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.new(key, number.to_bytes(8, "big") + text, hashlib.sha256).hexdigest().encode()
