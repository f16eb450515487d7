"""The exchange of keys between ranks, exactly the rows that are needed, and of their gradients.

One all-to-all collective brings keys and values, and one takes the gradients home. Both run beside
what is computed between their start and :meth:`Arriving.wait`. A transport that reads peers'
memory would copy the same rows: :class:`~parallel.context.documents.routes.Segment` is a rank, a
first row and a number of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.tracing import WAIT, Tracer
from parallel.context.documents.calls import RankCalls


class Arriving:
    """Rows on their way here.

    Attributes:
        rows: where they arrive, before others that are there; not to be read before :meth:`wait`.
    """

    def __init__(self, rows: Tensor, sent: Tensor, work: dist.Work | None, tracer: Tracer) -> None:
        self.rows = rows
        # Kept until they have left.
        self._sent: Tensor | None = sent
        self._work = work
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

    group: dist.ProcessGroup
    rank: int
    calls: RankCalls
    tracer: Tracer

    def fetch(self, k: Tensor, v: Tensor) -> Arriving:
        """Keys and values [T, H_kv, D] of this rank's tokens -> those of the second call."""
        calls = self.calls
        rows = k.new_empty((calls.num_keys, 2, *k.shape[1:]))
        own = rows[calls.num_arriving :]
        for place, x in enumerate((k, v)):
            own[: len(calls.again), place] = x.index_select(0, calls.again)
            own[len(calls.again) :, place] = x[calls.joined_rows]
        sent = torch.stack([x.index_select(0, calls.send) for x in (k, v)], dim=1)
        return self._start(sent, calls.send_counts, rows, calls.receive_counts)

    def give_back(self, gradients: Tensor) -> Arriving:
        """Gradients of what :meth:`fetch` brought -> those of the rows that it sent."""
        calls = self.calls
        rows = gradients.new_empty((len(calls.send), *gradients.shape[1:]))
        leaving = gradients[: calls.num_arriving].contiguous()
        return self._start(leaving, calls.receive_counts, rows, calls.send_counts)

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

    def _start(self, sent: Tensor, counts: list[int], rows: Tensor, coming: list[int]) -> Arriving:
        row_bytes = sent.element_size() * sent[0:1].shape[1:].numel()
        self.tracer.sent(sum(counts) * row_bytes)
        # As bytes, which every backend moves, whatever the dtype.
        work = dist.all_to_all_single(
            rows[: sum(coming)].flatten(1).view(torch.uint8),
            sent.flatten(1).view(torch.uint8),
            coming,
            counts,
            group=self.group,
            async_op=True,
        )
        return Arriving(rows, sent, work, self.tracer)
