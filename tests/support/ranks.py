"""Runs functions of the tests on several ranks, in processes that all tests share.

There are four processes on gloo, or one for each GPU on NCCL. :func:`on_ranks` runs a function on
some of them, in a process group of their own, and returns the result of each; an error on a rank
is raised here with its traceback.
"""

from __future__ import annotations

import atexit
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from garbage import end_unused_threads, leave_out_modules
from torch import multiprocessing

NUM_PROCESSES = 4
"""On gloo."""

GROUPS = {1: (2,), 2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}
"""The processes of a group of each size. They are not the first ones, so that a test fails if a
rank in the group is taken for one in the world."""

TIMEOUT_S = 300
"""A guard against hanging for ever, whatever else the machine does."""


class RankError(Exception):
    """A function raised on a rank; the message holds its traceback."""


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``function(group, *arguments)`` on each rank of a group; results in rank order.

    ``function`` must stand at the top level of a test module.
    """
    return _run(_pool("gloo", NUM_PROCESSES), GROUPS[num_ranks], function, arguments)


def on_gpus(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Like :func:`on_ranks`, over NCCL with a GPU for each rank as its current device.

    Each number of ranks has processes of its own: PyTorch's symmetric memory numbers what a
    process shares over all its groups, and hangs where the ranks' numbers differ.
    """
    return _run(_pool("nccl", num_ranks), tuple(range(num_ranks)), function, arguments)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of this rank's tensors."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _run(
    pool: list[Connection],
    members: tuple[int, ...],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> list[Any]:
    for process in members:
        pool[process].send((len(members), function, arguments))
    replies = []
    for process in members:
        if not pool[process].poll(TIMEOUT_S):
            _pool.cache_clear()
            raise RankError(f"process {process} did not answer in {TIMEOUT_S} s")
        replies.append(pool[process].recv())
    failed = [text for ok, text in replies if not ok]
    if failed:
        raise RankError("\n".join(failed))
    return [value for _, value in replies]


@cache
def _pool(backend: str, num_processes: int) -> list[Connection]:
    """A connection to each process; they end with this one."""
    # Forked from one process that has imported the slow modules and has started no thread. CUDA
    # does not survive a fork.
    context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
    if backend == "gloo":
        context.set_forkserver_preload(
            ["torch.distributed", "torch._dynamo", "harness.run.workers.worker"]
        )
    folder = tempfile.TemporaryDirectory(prefix="attnbench-ranks-")
    ends, processes = [], []
    for rank in range(num_processes):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(backend, rank, num_processes, folder.name, theirs), daemon=True
        )
        process.start()
        ends.append(ours)
        processes.append(process)

    def close() -> None:
        for process in processes:
            process.kill()
        folder.cleanup()

    atexit.register(close)
    return ends


def _share_the_listener() -> None:
    """Have one thread of gloo's look for messages of all groups of this process.

    Each group has its own otherwise, which looks a hundred times a second: in two times four
    processes of thirty groups they took a tenth of the machine.
    """
    device = dist.ProcessGroupGloo.create_default_device()
    make = dist.ProcessGroupGloo.__init__

    def share(
        self: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timeout
        make(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = share


def _serve(
    backend: str, rank: int, num_processes: int, folder: str, connection: Connection
) -> None:
    torch.set_num_threads(1)
    _share_the_listener()
    members_of = GROUPS
    if backend == "nccl":
        torch.cuda.set_device(rank)
        members_of = {num_processes: tuple(range(num_processes))}
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    groups = {
        size: dist.new_group(list(members), timeout=timedelta(seconds=TIMEOUT_S / 2))
        for size, members in members_of.items()
    }
    while True:
        size, function, arguments = connection.recv()
        leave_out_modules()
        try:
            connection.send((True, function(groups[size], *arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))
        end_unused_threads()
