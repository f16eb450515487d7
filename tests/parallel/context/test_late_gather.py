"""Gathers over symmetric memory, whose side streams run as late as CUDA's streams allow.

On a CPU there are no streams, and a copy is done when the next line begins. Here barriers, copies
and sums of a side stream wait in its queue until the computing stream waits for an event behind
them, so that a pass which reads, overwrites or frees too early is wrong on a CPU as well.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CPU, Batch, attend, scheme_of, shard
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel.context.transports import symmetric_gather
from parallel.context.transports.peer_memory import HostPeerMemory
from parallel.streams import SideStream

BATCH = Batch(lengths=(24, 24), num_heads=8, num_kv_heads=4)


class LateStreams:
    """Queues of side streams; the computing stream runs at once.

    Args:
        delay: seconds of this rank before each copy.
    """

    def __init__(self, delay: float) -> None:
        self.num_freed = 0
        """Tensors that were gone when a copy into them ran."""
        self.num_barriers = {symmetric_gather._KEYS: 0, symmetric_gather._GRADIENTS: 0}
        self._delay = delay
        self._stream: SideStream | None = None
        self._queues: dict[SideStream | None, list[Callable[[], Any]]] = {}

    @property
    def num_left(self) -> int:
        """What no event that was waited for stands behind."""
        return sum(map(len, self._queues.values()))

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        late, barrier, run = self, HostPeerMemory.barrier, symmetric_gather._Copies.run
        gradients = symmetric_gather._Gradients

        class Event:
            def __init__(self, device: torch.device) -> None:
                self._queue = late._queues.setdefault(late._stream, [])
                self._behind = self._queue[-1] if self._queue else None

            def wait(self) -> None:
                assert late._stream is None, "a side stream begins when it is given work"
                while self._behind in self._queue:
                    self._queue.pop(0)()

        @contextlib.contextmanager
        def aside(stream: SideStream, *_: Any) -> Iterator[None]:
            late._stream = stream
            try:
                yield
            finally:
                late._stream = None

        def meet(memory: HostPeerMemory, channel: int) -> None:
            late.num_barriers[channel] += 1
            late._do(lambda: barrier(memory, channel))

        def copied(copies: Any, targets: Sequence[Tensor], tracer: Any) -> None:
            held = [weakref.ref(x) for x in targets]

            def copy() -> None:
                time.sleep(late._delay)
                found = [x() for x in held]
                late.num_freed += found.count(None)
                if None not in found:
                    run(copies, found, tracer)

            late._do(copy)

        def later(method: Callable[..., None]) -> Callable[..., None]:
            def called(*arguments: Any) -> None:
                late._do(lambda: method(*arguments))

            return called

        with (
            patch.object(symmetric_gather, "StreamEvent", Event),
            patch.object(symmetric_gather, "aside", aside),
            patch.object(symmetric_gather._Copies, "run", copied),
            patch.object(gradients, "begin", later(gradients.begin)),
            patch.object(gradients, "add_parts", later(gradients.add_parts)),
            patch.object(HostPeerMemory, "barrier", meet),
        ):
            yield

    def _do(self, work: Callable[[], Any]) -> None:
        if self._stream is None:
            work()
        else:
            self._queues.setdefault(self._stream, []).append(work)


def passes(bound: Any, saved: bool) -> list[Tensor]:
    """(o, dq, dk, dv) of three passes over other values; in a checkpoint, unless ``saved``."""
    found = []
    for number in range(3):
        q, k, v, do = (shard(bound, x + number, BATCH) for x in BATCH.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def run(*inputs: Tensor) -> Tensor:
            return attend(bound, list(inputs), BATCH)

        o = run(*leaves) if saved else checkpoint(run, *leaves, use_reentrant=False)
        found += [o.detach(), *torch.autograd.grad(o, leaves, do)]
    return found


def differences(
    group: dist.ProcessGroup, slow: int, at_once: int, saved: bool
) -> tuple[bool, list[int], int, int]:
    """Whether late side streams change no bit, and what they had to do."""
    options = {"kernel": "naive", "transport": "symmetric", "kv_heads_at_once": at_once}
    with scheme_of("zigzag_llama3", **options).bind(group, CPU) as bound:
        expected = passes(bound, saved)
    with scheme_of("zigzag_llama3", **options).bind(group, CPU) as bound:
        # Buffers are made in the first call.
        passes(bound, saved)
        late = LateStreams(0.01 if dist.get_rank(group) == slow else 0.0)
        with late.patched():
            found = passes(bound, saved)
    same = all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    return same, list(late.num_barriers.values()), late.num_freed, late.num_left


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "checkpoint"])
@pytest.mark.parametrize("at_once", [0, 1, 2])
@pytest.mark.parametrize("slow", [0, 2])
def test_passes_wait_for_their_copies(slow: int, at_once: int, saved: bool) -> None:
    """Two barriers of keys a pass, two of gradients a group; checkpoints make one pass twice."""
    groups = BATCH.num_kv_heads // at_once if at_once else 1
    barriers = [3 * 2 * (2 if saved else 3), 3 * 2 * groups]
    expected = (True, barriers, 0, 0)
    assert on_ranks(3, differences, slow, at_once, saved) == [expected] * 3
