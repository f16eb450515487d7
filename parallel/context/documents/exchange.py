"""The exchange of keys between ranks, exactly the rows that are needed, and of their gradients.

A transport moves rows: keys and values in a forward pass, their gradients on the way back. It does
so beside what is computed between its start and :meth:`Arriving.wait`: by one all-to-all collective
each way, here, or by copies out of peers' memory (:mod:`~parallel.context.documents.symmetric`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.tracing import WAIT, Tracer
from parallel.context.documents.calls import RankCalls

OWN, WAITING, REST = 0, 1, 2
"""Steps of a timeline: own keys, keys of other ranks, and own keys again in a backward pass."""


class Waits(Protocol):
    """What the current stream can be made to wait for."""

    def wait(self) -> Any:
        """Hold the current stream; on a CPU, the caller."""
        ...


class RowTransport(Protocol):
    """Moves rows between the ranks of a group; all of them start each exchange together."""

    @property
    def outside_bytes(self) -> int:
        """Bytes of device memory that it holds and PyTorch's allocator does not count."""
        ...

    def room(self, like: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Where to put the rows that leave, for rank 0, then for rank 1, ..., before :meth:`start`.

        Args:
            like: [rows, ...], of which the shape of a row, the dtype and the device are taken.
            counts: rows that each rank sends to each, [source][to]; not all zero.
        """
        ...

    def start(
        self,
        leaving: Tensor,
        landing: Tensor,
        counts: Sequence[Sequence[int]],
        tracer: Tracer,
        step: int,
    ) -> Waits:
        """Begin to move rows, beside what is computed next.

        Args:
            leaving: [rows, 2, H_kv, D]: the last :meth:`room`, filled.
            landing: [rows, 2, H_kv, D], contiguous: where those of rank 0 arrive, then of rank 1...
            counts: of :meth:`room`.
            step: of the timeline, in which they are waited for.
        """
        ...


class AllToAllRows:
    """One collective each way."""

    outside_bytes = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)

    def room(self, like: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """:meth:`RowTransport.room`."""
        return like.new_empty((sum(counts[self._rank]), *like.shape[1:]))

    def start(
        self,
        leaving: Tensor,
        landing: Tensor,
        counts: Sequence[Sequence[int]],
        tracer: Tracer,
        step: int,
    ) -> Waits:
        """:meth:`RowTransport.start`."""
        # As bytes, which every backend moves, whatever the dtype.
        work: Waits = dist.all_to_all_single(
            landing.flatten(1).view(torch.uint8),
            leaving.flatten(1).view(torch.uint8),
            [row[self._rank] for row in counts],
            list(counts[self._rank]),
            group=self._group,
            async_op=True,
        )
        return work


class Arriving:
    """Rows on their way here.

    Attributes:
        rows: where they arrive, before others that are there; not to be read before :meth:`wait`.
    """

    def __init__(self, rows: Tensor, sent: Tensor, work: Waits, tracer: Tracer) -> None:
        self.rows = rows
        # Kept until they have left.
        self._sent: Tensor | None = sent
        self._work: Waits | None = work
        self._tracer = tracer

    def wait(self, step: int) -> Tensor:
        """The rows; on CUDA the current stream waits, not the host."""
        if self._work is not None:
            with self._tracer.span(WAIT, step):
                self._work.wait()
        self._work = self._sent = None
        return self.rows


@dataclass(kw_only=True, slots=True, frozen=True)
class KeyExchange:
    """The exchanges of one pass; all ranks of the group make them together.

    Rows hold a key and its value, [rows, 2, H_kv, D], or their gradients.
    """

    transport: RowTransport
    calls: RankCalls
    tracer: Tracer

    def fetch(self, k: Tensor, v: Tensor) -> Arriving:
        """Keys and values [T, H_kv, D] of this rank's tokens -> those of the second call."""
        calls = self.calls
        rows = k.new_empty((calls.num_keys, 2, *k.shape[1:]))
        leaving = self.transport.room(rows, calls.counts)
        own = rows[calls.num_arriving :]
        num_again = len(calls.again)
        for place, x in enumerate((k, v)):
            # Each is a launch, and most ranks have rows for one or two of them alone.
            if len(calls.send):
                torch.index_select(x, 0, calls.send, out=leaving[:, place])
            if num_again:
                torch.index_select(x, 0, calls.again, out=own[:num_again, place])
            if len(own) > num_again:
                own[num_again:, place] = x[calls.joined_rows]
        return self._start(leaving, rows, calls.num_arriving, calls.counts, WAITING)

    def give_back(self, gradients: Tensor) -> Arriving:
        """Gradients of what :meth:`fetch` brought -> those of the rows that it sent."""
        calls = self.calls
        rows = gradients.new_empty((len(calls.send), *gradients.shape[1:]))
        leaving = self.transport.room(gradients, calls.home_counts)
        if calls.num_arriving:
            leaving.copy_(gradients[: calls.num_arriving])
        return self._start(leaving, rows, len(rows), calls.home_counts, REST)

    def joined(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Those of k and v of :attr:`~RankCalls.joined_rows`, among all of the second call."""
        own = gradients[self.calls.num_arriving + len(self.calls.again) :]
        return own[:, 0], own[:, 1]

    def add_home(self, dk: Tensor, dv: Tensor, gradients: Tensor, returned: Tensor) -> None:
        """Add to dk and dv [T, H_kv, D] what other calls found for this rank's keys.

        Sums are float32, in the order of ranks after this rank's second call: a rank uses a key
        once, so that no row is twice in what it returns, and every run adds in the same order.

        Args:
            gradients: of all keys of this rank's second call.
            returned: of the rows that were sent.
        """
        calls = self.calls
        if not len(calls.home):
            return
        own = gradients[calls.num_arriving : calls.num_arriving + len(calls.again)]
        counts = [len(calls.again), *calls.send_counts]
        total = torch.stack([x.index_select(0, calls.home) for x in (dk, dv)], dim=1).float()
        parts = own, *returned.split(calls.send_counts)
        for index, rows in zip(calls.home_places.split(counts), parts, strict=True):
            if len(index):
                total.index_add_(0, index, rows.float())
        for place, x in enumerate((dk, dv)):
            x.index_copy_(0, calls.home, total[:, place].to(x.dtype))

    def keys(self, arrived: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the second call."""
        k, v = (arrived[:, place].index_select(0, self.calls.gather) for place in (0, 1))
        return k, v

    def gradients(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Gradients of the second call's keys -> of the rows that :meth:`fetch` brought.

        Of a key that several of this rank's runs have seen it is the float32 sum.
        """
        gather, layers = self.calls.gather, self.calls.layers
        if len(layers) == 1:
            # Every row once: nothing to add, which CUDA does by slow atomics in half precision.
            total = dk.new_empty((self.calls.num_keys, 2, *dk.shape[1:]))
            for place, part in enumerate((dk, dv)):
                total[:, place].index_copy_(0, gather, part)
            return total
        total = dk.new_zeros((self.calls.num_keys, 2, *dk.shape[1:]), dtype=torch.float32)
        for start, stop in layers:
            for place, part in enumerate((dk, dv)):
                total[:, place].index_add_(0, gather[start:stop], part[start:stop].float())
        return total.to(dk.dtype)

    def _start(
        self,
        leaving: Tensor,
        rows: Tensor,
        num_arriving: int,
        counts: Sequence[Sequence[int]],
        step: int,
    ) -> Arriving:
        self.tracer.sent(leaving.nbytes)
        landing = rows[:num_arriving]
        work = self.transport.start(leaving, landing, counts, self.tracer, step)
        return Arriving(rows, leaving, work, self.tracer)
