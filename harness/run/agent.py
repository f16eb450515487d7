"""Agents: each starts the worker of one rank on another host, and passes lines to its leader."""

from __future__ import annotations

import contextlib
import selectors
import socket
import tempfile
import time
from pathlib import Path

import psutil

from harness import __version__
from harness.run.hosts import CONNECT_TIMEOUT_S, HostError
from harness.run.link import Link
from harness.run.rank import LOG_LINES, LocalRank, RankStart, start_rank


def serve_agent(*, address: str, port: int, rank: int, token: str, logs: Path) -> int:
    """Serve as the agent of one rank until the leader is done; returns the workers started.

    Raises HostError if the leader cannot be reached or refuses.
    """
    with (
        contextlib.closing(Link(_connect(address, port))) as link,
        # Workers that are started anew for another round find what the last ones compiled.
        tempfile.TemporaryDirectory(prefix="attnbench-") as caches,
    ):
        hello = {"rank": rank, "token": token, "host": socket.gethostname()}
        link.send(hello | {"version": __version__, "time_s": time.time()})
        answer = link.receive(timeout_s=CONNECT_TIMEOUT_S) or {}
        if "welcome" not in answer:
            raise HostError(answer.get("refused", f"{address}:{port} is no leader of this run"))
        number = 0
        while (order := link.receive(timeout_s=None)) is not None:
            if "start" not in order:
                continue
            number += 1
            worker = start_rank(RankStart(**order["start"]), logs=logs, caches=caches)
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
                    if "job" in order:
                        worker.send(order["job"])
                    elif "log" in order:
                        link.send({"log": worker.log_lines(LOG_LINES)})
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
                        link.send({"ended": code, "log": worker.log_lines(LOG_LINES)})
        except OSError:
            return False
        finally:
            doomed = worker.kill()
            worker.reap()
            psutil.wait_procs(doomed, timeout=5)
            with contextlib.suppress(OSError):
                link.send({"killed": True})


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=10.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostError(
                    f"{address}:{port}: no leader answers there ({error}); start the command with "
                    "launcher.node_rank=0 on that host"
                ) from error
            time.sleep(0.3)
