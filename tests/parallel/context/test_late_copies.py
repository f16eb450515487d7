"""Heads exchanged over symmetric memory, whose copies run as late as CUDA's streams allow.

On a CPU there are no streams, and a copy is done when the next line begins. Here it waits in a
queue until something waits for an event behind it, so that a pass which reads, overwrites or frees
too early is wrong on a CPU as well.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CPU, Batch, attend, scheme_of, shard
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel.context.heads import symmetric
from parallel.context.transports.peer_memory import HostPeerMemory
from parallel.streams import SideStream

BATCH = Batch(lengths=(24, 24), num_heads=12, num_kv_heads=3)


class LateCopies:
    """Copies of side streams, in queues; the computing stream runs at once."""

    def __init__(self) -> None:
        self.num_freed = 0
        """Tensors that were gone when a copy into them ran."""
        self._stream: SideStream | None = None
        self._queues: dict[SideStream | None, list[Any]] = {}
        self._num_run: dict[SideStream | None, int] = {}

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        late, run, barrier = self, symmetric._Copies.run, HostPeerMemory.barrier

        class Event:
            def __init__(self, device: torch.device) -> None:
                self._stream, self._length = late._stream, late._length(late._stream)

            def wait(self) -> None:
                # A side stream that waits holds up nothing but itself.
                if late._stream is None:
                    late._run(self._stream, self._length)

        @contextlib.contextmanager
        def aside(stream: SideStream, *_: Any) -> Iterator[None]:
            late._stream = stream
            try:
                yield
            finally:
                late._stream = None

        def add(copies: Any, targets: Sequence[Tensor], tracer: Any) -> None:
            held = [weakref.ref(x) for x in targets]
            call = (run, copies, held, tracer)
            late._queues.setdefault(late._stream, []).append(call)

        def meet(memory: HostPeerMemory, channel: int) -> None:
            if late._stream is not None:
                late._run(late._stream, late._length(late._stream))
            barrier(memory, channel)

        with (
            patch.object(symmetric, "StreamEvent", Event),
            patch.object(symmetric, "aside", aside),
            patch.object(symmetric._Copies, "run", add),
            patch.object(HostPeerMemory, "barrier", meet),
        ):
            yield
            for stream in self._queues:
                self._run(stream, self._length(stream))

    def _length(self, stream: SideStream | None) -> int:
        return len(self._queues.get(stream, ()))

    def _run(self, stream: SideStream | None, stop: int) -> None:
        """Run a stream's copies up to its ``stop``-th."""
        start = self._num_run.get(stream, 0)
        # What an exception left may be in a cycle, which goes at any time.
        gc.collect()
        for run, copies, held, tracer in self._queues.get(stream, [])[start:stop]:
            targets = [x() for x in held]
            self.num_freed += sum(x is None for x in targets)
            if None not in targets:
                run(copies, targets, tracer)
        self._num_run[stream] = max(start, stop)


def passes(bound: Any, after: str) -> list[Tensor]:
    """(o, dq, dk, dv) of two passes; ``after`` says how attention is followed in a checkpoint."""
    found = []
    for _ in range(2):
        q, k, v, do = (shard(bound, x, BATCH) for x in BATCH.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def run(*inputs: Tensor) -> Tensor:
            o = attend(bound, list(inputs), BATCH)
            return o if after == "nothing" else o.sin()

        if after == "no checkpoint":
            o = attend(bound, leaves, BATCH).sin()
        else:
            o = checkpoint(run, *leaves, use_reentrant=False)
            o = o.sin() if after == "nothing" else o
        found += [o.detach(), *torch.autograd.grad(o, leaves, do)]
    return found


def differences(group: dist.ProcessGroup, head_groups: int, after: str) -> tuple[bool, int]:
    """Whether late copies change a bit, and how many of them had nowhere to go."""
    options = {"kernel": "naive", "transport": "symmetric", "head_groups": head_groups}
    with scheme_of("ulysses", **options).bind(group, CPU) as bound:
        expected = passes(bound, "no checkpoint")
    late = LateCopies()
    with late.patched(), scheme_of("ulysses", **options).bind(group, CPU) as bound:
        found = passes(bound, after)
    same = all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    return same, late.num_freed


@pytest.mark.parametrize("after", ["no checkpoint", "nothing", "a sine"])
@pytest.mark.parametrize("head_groups", [1, 2, 3])
def test_checkpointed_passes_wait_for_their_copies(head_groups: int, after: str) -> None:
    """The forward pass runs again inside the backward pass, and stops as soon as it can."""
    assert on_ranks(2, differences, head_groups, after) == [(True, 0)] * 2
