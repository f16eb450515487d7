"""Agents: each starts the worker of one rank on another host, and passes lines to its leader."""

from __future__ import annotations

import contextlib
import selectors
import socket
import tempfile
import time
from pathlib import Path

import msgspec

from harness import __version__
from harness.run.children.deadline import POLL_S
from harness.run.children.rank import LOG_LINES, LocalRank, RankStart, start_rank
from harness.run.nodes import messages
from harness.run.nodes.entry import enter
from harness.run.nodes.hosts import CONNECT_TIMEOUT_S
from harness.run.nodes.link import Link

MOST_UNSENT_BYTES = 8 << 20
"""With more than this unsent, an agent waits for its leader before it reads its worker's events."""


def serve_agent(*, address: str, port: int, rank: int, key: bytes, run: str, logs: Path) -> int:
    """Serve as the agent of one rank until the leader is done; returns the workers started.

    Args:
        key: follows from the run's secret; see :meth:`Hosts.gathered`.

    Raises HostError if the leader cannot be reached or refuses.
    """
    host = socket.gethostname().encode("ascii", "replace").decode()
    hello = messages.Hello(run=run, rank=rank, host=host, version=__version__, time_s=time.time())
    with (
        contextlib.closing(enter(address, port, key, hello, timeout_s=CONNECT_TIMEOUT_S)) as link,
        # Workers that are started anew for another round find what the last ones compiled.
        tempfile.TemporaryDirectory(prefix="attnbench-") as caches,
    ):
        number = 0
        while (order := link.receive(timeout_s=None)) is not None:
            if not isinstance(order, messages.Start):
                continue
            number += 1
            worker = start_rank(msgspec.convert(order.start, RankStart), logs=logs, caches=caches)
            alive = _pass_on(link, worker)
            if not alive:
                break
        return number


def _pass_on(link: Link, worker: LocalRank) -> bool:
    """Pass lines both ways until the leader ends the worker; False if the leader has gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        selector.register(worker, selectors.EVENT_READ)
        try:
            while True:
                for order in link.taken():
                    if isinstance(order, messages.Job):
                        worker.send(order.line)
                    elif isinstance(order, messages.WantLog):
                        link.send(messages.LogLines(log=worker.log_lines(LOG_LINES)))
                    elif isinstance(order, messages.Kill):
                        return True
                if link.unsent_bytes > MOST_UNSENT_BYTES:
                    # The worker waits meanwhile, as it would for a stopped parent of its own.
                    if link.fill(POLL_S):
                        return False
                    continue
                selector.select(POLL_S)
                if link.fill(0.0):
                    return False
                if worker.closed:
                    continue
                # Also when it has nothing to say: its log is looked after.
                events, ended = worker.read()
                for event in events:
                    link.send(messages.Event(event=event))
                if ended:
                    selector.unregister(worker)
                    code = worker.returncode(5.0)
                    link.send(messages.Ended(code=code, log=worker.log_lines(LOG_LINES)))
        except OSError:
            return False
        finally:
            worker.kill()
            worker.reap()
            with contextlib.suppress(OSError):
                link.send(messages.Killed())
