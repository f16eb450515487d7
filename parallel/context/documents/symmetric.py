"""Rows of other ranks copied out of their memory, by copy engines instead of kernels.

A collective is a kernel. Where attention fills the SMs of a rank that sends, it waits for them, and
so do the ranks that have nothing to compute until rows arrive; where a rank waits for others, it
holds SMs that attention wants. Copies out of symmetric memory and barriers between them take none.

Each rank writes the rows that leave it into its buffer, in the order of the ranks that they are
for. So what a peer wants is one contiguous block, whose place follows from the plan, and so is
where it lands. Order of events, on the streams of one rank:

    compute   wait for the last exchange's second barrier, gather leaving rows into the own buffer
    side      wait for that write, barrier (all have written), copy one block from every peer,
              barrier (all have read)
    compute   compute what needs no rows of others; wait for the second barrier, read what landed

What could meet in one place, and what keeps it apart:

- A peer's write of a block, and my copy of it: the peer's first barrier follows its write, and my
  copy follows my first barrier, which waits for the peer's.
- My copy out of a peer's buffer, and the peer's next write into it: its write follows its second
  barrier, which waits for mine, and mine follows my copies on one stream. After a pass that an
  error has left before it waited for its rows, the next exchange waits instead of it.
- My copy into a tensor, and other uses of its memory: earlier ones are on the computing stream
  before what the side stream waits for. Later ones follow the wait; until then the tensor is held
  here.
- A buffer that is let go for a larger one: all ranks find the same size in the plan, so they
  allocate together, when the copies of all of them have ended.

An exchange has two barriers, so every pass has an even number, as one in a CUDA graph must have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.tracing import Tracer, aside
from parallel.context.transports.peer_memory import PeerBuffers, PeerMemory
from parallel.streams import StreamEvent

_CHANNEL = 0


class SymmetricRows:
    """A :class:`~parallel.context.documents.exchange.RowTransport` over the ranks of one host."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._buffers = PeerBuffers(group, device)
        self._memory: PeerMemory | None = None
        """Whose part of this rank is the last room."""
        self._read: StreamEvent | None = None
        """When all ranks have read what they fetch; None once this stream has waited for it."""
        self._landing: Sequence[Tensor] = ()
        """What is copied into, until then."""

    @property
    def outside_bytes(self) -> int:
        """Bytes of device memory that it holds and PyTorch's allocator does not count."""
        return self._buffers.outside_bytes

    def room(self, like: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """:meth:`~parallel.context.documents.exchange.RowTransport.room`."""
        self.wait()
        row_bytes = like.element_size() * like.shape[1:].numel()
        self._memory = self._buffers.get("rows", _most_rows(counts) * row_bytes)
        num_rows = sum(counts[self._rank])
        if not num_rows:
            return like.new_empty((0, *like.shape[1:]))
        shape = torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, device="meta")
        return self._memory.of_rank(self._rank, 0, shape)

    def start(
        self,
        leaving: Tensor,
        landing: Tensor,
        counts: Sequence[Sequence[int]],
        tracer: Tracer,
        step: int,
    ) -> SymmetricRows:
        """:meth:`~parallel.context.documents.exchange.RowTransport.start`."""
        memory = self._memory
        assert memory is not None, "rows are put into room() before they start"
        row_bytes = leaving.element_size() * leaving.shape[1:].numel()
        written = StreamEvent(self._device)
        self._landing = landing.split([row[self._rank] for row in counts])
        with aside(self._buffers.fetching, tracer, step, written):
            memory.barrier(_CHANNEL)
            for distance in range(1, self._num_ranks):
                # A different peer for each rank at each step, so that no link is shared.
                peer = (self._rank - distance) % self._num_ranks
                into = self._landing[peer]
                if len(into):
                    start = sum(counts[peer][: self._rank]) * row_bytes
                    into.copy_(memory.of_rank(peer, start, into), non_blocking=True)
            memory.barrier(_CHANNEL)
            self._read = StreamEvent(self._device)
        return self

    def wait(self) -> None:
        """Have the current stream wait for the exchange that was started last."""
        if self._read is not None:
            self._read.wait()
        self._read, self._landing = None, ()


def _most_rows(counts: Sequence[Sequence[int]]) -> int:
    """The most rows that leave any rank, in an exchange or in that of their gradients."""
    return max(map(sum, itertools.chain(counts, zip(*counts, strict=True))))
