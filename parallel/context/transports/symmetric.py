"""Transports that read other ranks' memory directly, with copy engines instead of kernels.

A message library moves data with kernels that take SMs away from attention; a copy engine takes
none. Ranks publish their keys in a buffer that peers can read, and each rank fetches the next
block into a buffer of its own while it computes with this one. For gradients each rank
publishes its part in the keys' dtype, and the owner fetches and sums the parts in float32:
every part is rounded once, so that the error does not grow with ranks.

Order of events, on the streams of one rank, for a pass over P ranks:

    compute   barrier 0 (peers are done with my last keys), publish, barrier 0 (all published)
    fetch     wait until the target buffer is no longer computed with, copy from the peer
    compute   wait for the copy, compute step t
    gradient  wait for step t's part, barrier 1 (all parts of step t are published), copy mine
              from the peer that computed it; a slot is written again two steps later, after
              barrier 1 of the step between has shown that its reader is done
    compute   after step t + 1: wait for the copy, add

Sums are the one thing here that needs SMs, and so the ring does not make them beside an attention
kernel: in one whose programs all run at once and wait for each other, whatever holds up one of
them holds up all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.halo import Halo, keeps, room_for
from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.schedule import RankSchedule
from parallel.context.blocks.tracing import WAIT, Tracer, aside
from parallel.context.transports.all_gather import write_contributions
from parallel.context.transports.own_gradients import OwnGradients
from parallel.context.transports.peer_memory import PeerBuffers, PeerMemory, aligned
from parallel.context.transports.symmetric_halo import SymmetricHalo, reserve_for_halo
from parallel.streams import StreamEvent


class Pair:
    """Places of k (or dk) and v (or dv) in a peer's buffer, slot by slot.

    Args:
        k, v: tensors in their form; they may be on the device "meta".
    """

    def __init__(self, memory: PeerMemory, k: Tensor, v: Tensor) -> None:
        self._memory = memory
        self._like = (k, v)
        self._second = aligned(k.nbytes)
        self._slot_bytes = self._second + aligned(v.nbytes)

    @staticmethod
    def bytes_of(k: Tensor, v: Tensor, num_slots: int) -> int:
        return num_slots * (aligned(k.nbytes) + aligned(v.nbytes))

    def of_rank(
        self, rank: int, slot: int = 0, like: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tensors of a slot, or smaller ones in the form of ``like``."""
        start = slot * self._slot_bytes
        like = like or self._like
        return (
            self._memory.of_rank(rank, start, like[0]),
            self._memory.of_rank(rank, start + self._second, like[1]),
        )


def reserve_for_ring(
    buffers: PeerBuffers, k: Tensor, schedule: RankSchedule, *, trained: bool
) -> None:
    """Have the buffers of passes of :class:`SymmetricRing` over keys and values like ``k``."""
    if schedule.halo is not None and schedule.halo.counts is not None:
        reserve_for_halo(buffers, k, schedule.halo.counts)
        return
    buffers.get("keys", Pair.bytes_of(k, k, 1))
    if trained:
        buffers.get("gradients", Pair.bytes_of(k, k, 2))


class SymmetricRing:
    """Visits every rank's keys in turn, rank - t at step t, fetched straight from their owner.

    Where a mask shows few of them, as :class:`SymmetricHalo` does.
    """

    _KEYS, _GRADIENTS = 0, 1
    """Channels of barriers; different streams of a rank wait in them at the same time."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, buffers: PeerBuffers, tracer: Tracer
    ) -> None:
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._buffers = buffers
        self._tracer = tracer
        self._fetching, self._reducing = buffers.fetching, buffers.reducing
        self._published: list[StreamEvent] = []
        """For each step, the event that all ranks have published, and freed the slot before."""
        self._totals: OwnGradients | None = None
        self._landed: list[Tensor] = []
        """The gradients of the step before, valid once ``_last`` has passed."""
        self._last = StreamEvent(device)
        self._halo: Halo | None = None
        self._few: SymmetricHalo | None = None
        self._own: tuple[Tensor, Tensor] | None = None

    def visits(
        self, k: Tensor, v: Tensor, schedule: RankSchedule, kept: Sequence[Visit] | None = None
    ) -> Iterator[Visit]:
        if schedule.halo is not None and keeps(schedule.halo):
            self._few = SymmetricHalo(
                self._rank, self._num_ranks, self._buffers, self._tracer, schedule.halo
            )
            yield from self._few.visits(k, v, schedule, kept)
            return
        heads = slice(0, k.shape[schedule.head_dim_of[0]])
        here = (k.contiguous(), v.contiguous())
        memory = self._buffers.get("keys", Pair.bytes_of(*here, 1))
        keys = Pair(memory, *here)
        self._halo, self._own = schedule.halo, here
        with self._tracer.span(WAIT, 0):
            publish(memory, keys.of_rank(self._rank), here, self._KEYS)
        if self._halo is not None:
            yield from self._visits_of_rows(keys, heads, self._halo)
            return
        landing = [tuple(torch.empty_like(x) for x in here) for _ in range(2)]
        coming = StreamEvent(self._device)
        for step in range(self._num_ranks):
            if step + 1 < self._num_ranks:
                # Until now the buffer held the keys of the step before, now computed with.
                free = StreamEvent(self._device)
                peer = (self._rank - step - 1) % self._num_ranks
                target = landing[step % 2]
                with aside(self._fetching, self._tracer, step + 1, free):
                    for into, out in zip(target, keys.of_rank(peer), strict=True):
                        into.copy_(out, non_blocking=True)
                        self._tracer.sent(out.nbytes)
                    coming = StreamEvent(self._device)
            source = (self._rank - step) % self._num_ranks
            yield Visit(step=step, source=source, kv_heads=heads, k=here[0], v=here[1])
            if step + 1 < self._num_ranks:
                with self._tracer.span(WAIT, step + 1):
                    coming.wait()
                here = target

    def _visits_of_rows(self, keys: Pair, heads: slice, halo: Halo) -> Iterator[Visit]:
        """Visits of the rows that are needed, also of none: ranks meet at each step's barrier."""
        assert self._own is not None, "visits() sets it"
        coming = []
        for step in range(1, self._num_ranks):
            source = (self._rank - step) % self._num_ranks
            rows, arrived = halo.needed[source], None
            target = [room_for(rows, x) for x in self._own]
            if rows is not None:
                with aside(self._fetching, self._tracer, step, StreamEvent(self._device)):
                    for into, out in zip(target, keys.of_rank(source), strict=True):
                        into.copy_(rows.take(out), non_blocking=True)
                        self._tracer.sent(into.nbytes)
                    arrived = StreamEvent(self._device)
            coming.append((step, source, target, arrived))
        own_k, own_v = self._own
        yield Visit(step=0, source=self._rank, kv_heads=heads, k=own_k, v=own_v)
        for step, source, target, arrived in coming:
            if arrived is not None:
                with self._tracer.span(WAIT, step):
                    arrived.wait()
            yield Visit(step=step, source=source, kv_heads=heads, k=target[0], v=target[1])

    def deliver(self, visit: Visit, contributions: Sequence[Contribution]) -> None:
        if self._few is not None:
            self._few.deliver(visit, contributions)
            return
        if visit.step == 0:
            self._totals = OwnGradients(visit, contributions, self._halo)
            return
        assert self._totals is not None, "the first visit is of this rank's own keys"
        assert self._own is not None, "visits() sets it"
        memory = self._buffers.get("gradients", Pair.bytes_of(*self._own, 2))
        slots, slot = Pair(memory, *self._own), visit.step % 2
        self._add_landed(self._totals, visit.step)
        if len(self._published) >= 2:
            # Barrier 1 of the step between has shown that the slot's reader is done.
            with self._tracer.span(WAIT, visit.step):
                self._published[-1].wait()
        if visit.k.numel():
            mine = slots.of_rank(self._rank, slot, (visit.k, visit.v))
            for name, out in zip(("dk", "dv"), mine, strict=True):
                write_contributions(out, contributions, name)
        peer = (self._rank + visit.step) % self._num_ranks
        asked = self._asked_by(peer)
        parts = () if asked is None else slots.of_rank(peer, slot, asked)
        # Memory of the computing stream, which reads it last.
        self._landed = [torch.empty_like(part) for part in parts]
        written = StreamEvent(self._device)
        with aside(self._reducing, self._tracer, visit.step, written):
            if visit.step == 1:
                # A pass that an error ended, on all ranks, may have left an odd number.
                memory.settle(self._GRADIENTS)
            memory.barrier(self._GRADIENTS)
            self._published.append(StreamEvent(self._device))
            for landing, part in zip(self._landed, parts, strict=True):
                landing.copy_(part, non_blocking=True)
                self._tracer.sent(part.nbytes)
            self._last = StreamEvent(self._device)

    def _asked_by(self, peer: int) -> tuple[Tensor, Tensor] | None:
        """Tensors in the form of the rows of this rank's keys that a peer has computed with."""
        assert self._own is not None, "visits() sets it"
        if self._halo is None:
            return self._own
        rows = self._halo.asked[peer]
        if rows is None:
            return None
        k, v = self._own
        return room_for(rows, k), room_for(rows, v)

    def _add_landed(self, totals: OwnGradients, step: int) -> None:
        """Add what landed of the step before ``step``."""
        if not self._landed:
            return
        with self._tracer.span(WAIT, step):
            self._last.wait()
        rows = None
        if self._halo is not None:
            rows = self._halo.asked[(self._rank + step - 1) % self._num_ranks]
        totals.add(rows, self._landed)
        self._landed = []

    def collect(self) -> tuple[Tensor, Tensor]:
        if self._few is not None:
            return self._few.collect()
        assert self._totals is not None, "collect() follows deliver()"
        memory = self._buffers.get("gradients", 0)
        read = self._last
        self._add_landed(self._totals, self._num_ranks)
        with aside(self._reducing, self._tracer, self._num_ranks, read):
            # The next pass writes the slots anew, when all have read them.
            memory.barrier(self._GRADIENTS)
            memory.settle(self._GRADIENTS)
            self._last = StreamEvent(self._device)
        with self._tracer.span(WAIT, self._num_ranks):
            self._last.wait()
        return self._totals.result()


def publish(
    memory: PeerMemory, into: Sequence[Tensor], tensors: Sequence[Tensor], channel: int
) -> None:
    """Copy this rank's tensors to where its peers read them, between two barriers."""
    memory.barrier(channel)
    for out, x in zip(into, tensors, strict=True):
        out.copy_(x)
    memory.barrier(channel)
