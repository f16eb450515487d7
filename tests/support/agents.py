"""Leaders, agents and strangers on loopback, without workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fault_folders import GUARD_S

from harness import __version__
from harness.run.nodes.entry import enter
from harness.run.nodes.hosts import Hosts
from harness.run.nodes.link import Link
from harness.run.nodes.messages import Hello

KEY = b"the key of this run"


@dataclass(slots=True)
class Led:
    """A leader that waits for agents."""

    port: int
    gathered: Future[Hosts]

    def connect(self) -> socket.socket:
        """A stranger's connection, once the leader listens."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=GUARD_S)
            except ConnectionRefusedError:
                self.require_waiting()
                time.sleep(0.01)

    def join(self, rank: int = 1, key: bytes = KEY, **changes: Any) -> Link:
        """Join as an agent does."""
        return enter("127.0.0.1", self.port, key, hello(rank, **changes), timeout_s=GUARD_S)

    def require_waiting(self) -> None:
        """Raise what ended the leader, if it has ended."""
        if self.gathered.done():
            self.gathered.result()


def hello(rank: int = 1, **changes: Any) -> Hello:
    values: dict[str, Any] = {"run": "run", "rank": rank, "host": f"n{rank}"}
    return Hello(**values | {"version": __version__, "time_s": time.time()} | changes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def leader(world_size: int = 2) -> Iterator[Led]:
    """A leader of one rank, which waits for the others; its hosts are dismissed at the end."""
    port = free_port()
    values: dict[str, Any] = {"address": "127.0.0.1", "port": port, "world_size": world_size}
    values |= {"local_ranks": 1, "ranks_per_node": 1, "key": KEY, "run": "run"}
    manager = Hosts.gathered(**values)
    with ThreadPoolExecutor() as pool:
        led = Led(port, pool.submit(manager.__enter__))
        try:
            yield led
        finally:
            if not led.gathered.done() or led.gathered.exception() is None:
                led.gathered.result(timeout=GUARD_S)
                manager.__exit__(None, None, None)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait for something that other threads do."""
    deadline = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
