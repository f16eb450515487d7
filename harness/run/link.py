"""A connection between two hosts that carries one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Link:
    """A connection that carries one JSON object a line."""

    connection: socket.socket
    host: str = ""
    _buffer: bytes = b""
    _waiting: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A node that loses power does not close its connections.
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
        """Read what has arrived, waiting up to ``timeout_s``; True if the connection has ended."""
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
            # Another program than an agent has connected to the port.
            return True
        return not data

    def taken(self) -> list[dict[str, Any]]:
        """The messages read since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message; None if the connection ends or the time is up."""
        return self._next(lambda message: True, timeout_s)

    def receive_with(self, key: str, timeout_s: float) -> dict[str, Any] | None:
        """The next message that has ``key``; earlier ones are dropped."""
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
