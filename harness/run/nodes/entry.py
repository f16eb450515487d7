"""An agent's way in: to the leader's door, with proofs in both directions."""

from __future__ import annotations

import contextlib
import socket
import time

from harness.run.nodes.errors import HostError
from harness.run.nodes.handshake import (
    LINE_BYTES,
    NO_PROTOCOL,
    HandshakeError,
    WrongSecretError,
    agent_side,
)
from harness.run.nodes.link import Link
from harness.run.nodes.messages import Hello, Refused, Welcome

ANSWER_S = 30.0
"""How long a leader may take to answer before the agent tries again."""

_PAUSE_S = 0.3


def enter(address: str, port: int, key: bytes, hello: Hello, *, timeout_s: float) -> Link:
    """Join the leader at an address, once it is there; raises HostError in one line."""
    where = f"{address}:{port}"
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link = _shake_hands(address, port, key)
            break
        except WrongSecretError as error:
            raise HostError(
                f"{where}: the leader has another secret; give this command the "
                "launcher.rdzv_secret that the leader printed or was given"
            ) from error
        except HandshakeError as error:
            raise HostError(f"{where} is no leader of this run: {error}") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostError(
                    f"{where}: no leader answers there ({error}); start the command with "
                    "launcher.node_rank=0 on that host"
                ) from error
            time.sleep(_PAUSE_S)
    with contextlib.suppress(OSError):
        link.send(hello)
        answer = link.receive(timeout_s)
        if isinstance(answer, Welcome):
            return link
        if isinstance(answer, Refused):
            link.close()
            raise HostError(answer.reason)
    link.close()
    raise HostError(f"{where}: the leader has gone")


def _shake_hands(address: str, port: int, key: bytes) -> Link:
    """A link whose ends have proved themselves; OSError if the other one does not answer."""
    connection = socket.create_connection((address, port), timeout=10.0)
    try:
        deadline = time.monotonic() + ANSWER_S
        side = agent_side(key)
        step = next(side)
        buffer = b""
        while step.keys is None:
            assert step.line is not None, "the agent answers every line"
            connection.sendall(step.line + b"\n")
            while b"\n" not in buffer:
                if len(buffer) > LINE_BYTES:
                    raise HandshakeError(NO_PROTOCOL)
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                data = connection.recv(4096)
                if not data:
                    raise ConnectionResetError("it hung up")
                buffer += data
            line, _, buffer = buffer.partition(b"\n")
            step = side.send(line)
        return Link.of_agent(connection, step.keys, buffer)
    except BaseException:
        connection.close()
        raise
