"""The ring: keys travel from rank to rank, and their gradients with them.

At step t, rank r computes with the keys of rank r - t, while it sends them on to rank r + 1 and
receives those of r - t - 1. In a backward pass the float32 gradients of a block of keys leave
a rank after it has added its part, one step behind the keys, so that they too travel while the
next block is computed; after P hops they are home. NCCL or gloo, whatever the group has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.schedule import RankSchedule
from parallel.context.blocks.tracing import WAIT, Tracer
from parallel.context.transports.all_gather import sum_of_contributions
from parallel.context.transports.halo_exchange import HaloExchange
from parallel.context.transports.messages import Messages


class _Exchange:
    """Tensors on their way to the next rank, and those of the previous rank on their way here."""

    def __init__(
        self, messages: Messages, tensors: Sequence[Tensor], first_tag: int, tracer: Tracer
    ) -> None:
        rank, num_ranks = messages.rank, messages.num_ranks
        self.received = tuple([torch.empty_like(x) for x in tensors])
        # Kept until they have left.
        self._sent = tensors
        for out in tensors:
            tracer.sent(out.nbytes)
        self._works = messages.start(
            tensors, (rank + 1) % num_ranks, self.received, (rank - 1) % num_ranks, first_tag
        )

    def wait(self) -> tuple[Tensor, ...]:
        """The received tensors; on CUDA the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._sent = ()
        return self.received


class SendRecv:
    """Point-to-point messages: around the ring between neighbours, the next block in flight; or,
    where ranks need some rows alone, from each owner to whom needs them.
    """

    _KEYS, _GRADIENTS = 0, 2
    """Tags: keys and gradients of one step may be on their way at the same time."""

    def __init__(self, messages: Messages, tracer: Tracer) -> None:
        self._messages = messages
        self._rank, self._num_ranks = messages.rank, messages.num_ranks
        self._tracer = tracer
        self._gradients: _Exchange | None = None
        self._halo: HaloExchange | None = None

    def visits(
        self, k: Tensor, v: Tensor, schedule: RankSchedule, kept: Sequence[Visit] | None = None
    ) -> Iterator[Visit]:
        if schedule.halo is not None:
            self._halo = HaloExchange(self._messages, self._tracer, schedule.halo)
            yield from self._halo.visits(k, v, schedule, kept)
            return
        heads = slice(0, k.shape[schedule.head_dim_of[0]])
        here: tuple[Tensor, ...] = (k.contiguous(), v.contiguous())
        for step in range(self._num_ranks):
            coming = None
            if step + 1 < self._num_ranks:
                coming = _Exchange(self._messages, here, self._KEYS, self._tracer)
            source = (self._rank - step) % self._num_ranks
            yield Visit(step=step, source=source, kv_heads=heads, k=here[0], v=here[1])
            if coming is not None:
                with self._tracer.span(WAIT, step + 1):
                    here = coming.wait()

    def deliver(self, visit: Visit, contributions: Sequence[Contribution]) -> None:
        if self._halo is not None:
            self._halo.deliver(visit, contributions)
            return
        totals: tuple[Tensor, ...]
        if self._gradients is None:
            totals = (
                sum_of_contributions(visit.k, contributions, "dk").contiguous(),
                sum_of_contributions(visit.v, contributions, "dv").contiguous(),
            )
        else:
            with self._tracer.span(WAIT, visit.step):
                totals = self._gradients.wait()
            for part in contributions:
                part.call.kv.add(totals[0], part.dk)
                part.call.kv.add(totals[1], part.dv)
        self._gradients = _Exchange(self._messages, totals, self._GRADIENTS, self._tracer)

    def collect(self) -> tuple[Tensor, Tensor]:
        if self._halo is not None:
            return self._halo.collect()
        assert self._gradients is not None, "collect() follows deliver()"
        with self._tracer.span(WAIT, self._num_ranks):
            dk, dv = self._gradients.wait()
        return dk, dv
