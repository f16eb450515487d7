"""The few rows of keys that a mask shows other ranks, and their gradients, in symmetric memory.

A forward pass brings keys to the ranks that need them, and these keep them. So a backward pass
brings gradients alone, and computes with the keys of other ranks first. Either way rows travel once
in a pass, while the rank computes with its own keys:

    compute   copy what each peer needs into a place of this rank's buffer for the distance to it
    side      barrier (all ranks have written), copy the peers' rows here, barrier (all have read)
    compute   compute with the own keys, wait for the second barrier, use the rows

The second barrier lets the next pass write: its copies into the buffer follow on the computing
stream, which has waited for it. The first one comes after this rank's copies, since the side
stream has waited for them. So no pass begins with a barrier, and computing waits for none before
it has computed with its own keys. Buffers are no others' than these passes'.

What is read of a peer is contiguous, and the copy engines bring it: a copy by a kernel would wait
for SMs until the attention kernel beside it has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from parallel.context.blocks.halo import Halo, room_for
from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.rows import Rows
from parallel.context.blocks.schedule import RankSchedule
from parallel.context.blocks.tracing import WAIT, Tracer, aside
from parallel.context.transports.all_gather import write_contributions
from parallel.context.transports.own_gradients import OwnGradients
from parallel.context.transports.peer_memory import PeerBuffers, PeerMemory, aligned
from parallel.context.transports.strided_copy import copy_rows
from parallel.streams import StreamEvent


def reserve_for_halo(
    buffers: PeerBuffers, k: Tensor, counts: Sequence[int]
) -> tuple[PeerMemory, list[int]] | None:
    """The buffer of passes of :class:`SymmetricHalo` over k and v [B, H, S, D] like ``k``.

    And where it has rows of k, then of v, for the peers at distances 1, 2, ...; None for no rows.
    """
    if not any(counts):
        return None
    row_bytes = k.nbytes // k.shape[2]
    sizes = [aligned(count * row_bytes) for count in counts for _ in ("k", "v")]
    *offsets, num_bytes = itertools.accumulate(sizes, initial=0)
    return buffers.get("halo", num_bytes), offsets


class SymmetricHalo:
    """The exchange of one pass over the ranks of a group, for a halo that keeps keys."""

    _CHANNEL = 0

    def __init__(
        self, rank: int, num_ranks: int, buffers: PeerBuffers, tracer: Tracer, halo: Halo
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._buffers, self._tracer, self._halo = buffers, tracer, halo
        self._own: tuple[Tensor, Tensor] | None = None
        self._buffer: tuple[PeerMemory, list[int]] | None = None
        self._totals: OwnGradients | None = None
        self._returned: list[tuple[int, int, tuple[Tensor, Tensor]]] = []
        self._read: StreamEvent | None = None
        """When all ranks have read what they fetch; None where no rank needs anything."""

    def visits(
        self, k: Tensor, v: Tensor, schedule: RankSchedule, kept: Sequence[Visit] | None
    ) -> Iterator[Visit]:
        """As :meth:`parallel.context.blocks.loops.Transport.visits`."""
        heads = slice(0, k.shape[schedule.head_dim_of[0]])
        assert self._halo.counts is not None, "few rows are counted"
        self._own, self._buffer = (k, v), reserve_for_halo(self._buffers, k, self._halo.counts)
        own = Visit(step=0, source=self._rank, kv_heads=heads, k=k, v=v)
        if kept is None:
            for step in range(1, self._num_ranks):
                rows = self._halo.asked[(self._rank + step) % self._num_ranks]
                if rows is not None:
                    for place, x in enumerate((k, v)):
                        taken = rows.take(x)
                        copy_rows(self._place(self._rank, step, place, taken), taken)
            coming = self._fetch(self._halo.needed, -1)
            yield own
            self._wait()
            for step, source, (peer_k, peer_v) in coming:
                yield Visit(step=step, source=source, kv_heads=heads, k=peer_k, v=peer_v)
        else:
            yield from kept
            self._returned = self._fetch(self._halo.asked, 1)
            yield own

    def deliver(self, visit: Visit, contributions: Sequence[Contribution]) -> None:
        """Sum up the gradients of the own keys, or write others' where their owner reads them."""
        if visit.step == 0:
            self._totals = OwnGradients(visit, contributions, self._halo)
            return
        for place, (name, like) in enumerate((("dk", visit.k), ("dv", visit.v))):
            into = self._place(self._rank, visit.step, place, like)
            write_contributions(into, contributions, name)

    def collect(self) -> tuple[Tensor, Tensor]:
        """(dk, dv) of the own keys, summed over all ranks."""
        assert self._totals is not None, "collect() follows deliver()"
        self._wait()
        for _, peer, parts in self._returned:
            self._totals.add(self._halo.asked[peer], parts)
        return self._totals.result()

    def _place(self, rank: int, step: int, place: int, like: Tensor) -> Tensor:
        """Where a rank's buffer has rows for the peer at a distance: of k or dk, of v or dv."""
        assert self._buffer is not None, "visits() sets it"
        memory, offsets = self._buffer
        return memory.of_rank(rank, offsets[2 * (step - 1) + place], like)

    def _fetch(
        self, rows_of: Sequence[Rows | None], direction: int
    ) -> list[tuple[int, int, tuple[Tensor, Tensor]]]:
        """Start to copy what peers have written for this rank; their distances and ranks with it.

        Args:
            rows_of: the rows that come from each rank, of whichever keys they are.
            direction: of the ranks that they come from, as seen from here.
        """
        assert self._own is not None, "visits() sets it"
        if self._buffer is None:
            return []
        (k, v), (memory, _) = self._own, self._buffer
        coming = []
        for step in range(1, self._num_ranks):
            peer = (self._rank + direction * step) % self._num_ranks
            if (rows := rows_of[peer]) is not None:
                # Memory of the computing stream, which reads it last.
                coming.append((step, peer, (room_for(rows, k), room_for(rows, v))))
        written = StreamEvent(k.device)
        with aside(self._buffers.fetching, self._tracer, 1, written):
            memory.barrier(self._CHANNEL)
            for step, peer, landing in coming:
                for place, into in enumerate(landing):
                    copy_rows(into, self._place(peer, step, place, into))
                    self._tracer.sent(into.nbytes)
            memory.barrier(self._CHANNEL)
            self._read = StreamEvent(k.device)
        return coming

    def _wait(self) -> None:
        """Hold the computing stream until all ranks have read, this one among them."""
        if self._read is not None:
            with self._tracer.span(WAIT, 1):
                self._read.wait()
