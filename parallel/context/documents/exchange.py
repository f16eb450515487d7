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
        rows: where they arrive; not to be read before :meth:`wait`.
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
        """Keys and values [T, H_kv, D] of this rank's tokens -> those that its queries need."""
        sent = torch.stack([x.index_select(0, self.calls.send) for x in (k, v)], dim=1)
        return self._start(sent, self.calls.send_counts, self.calls.receive_counts)

    def give_back(self, gradients: Tensor) -> Arriving:
        """Gradients of what :meth:`fetch` brought -> those of the rows that it sent."""
        counts = self.calls.receive_counts, self.calls.send_counts
        return self._start(gradients.contiguous(), *counts)

    def add_home(self, total: Tensor, returned: Tensor) -> None:
        """Add gradients that came home to the float32 [T, 2, H_kv, D], in rank order.

        A rank uses a key once, so that no row is twice in what it returns, and the order of
        additions is the same in every run.
        """
        counts = self.calls.send_counts
        for index, rows in zip(self.calls.send.split(counts), returned.split(counts), strict=True):
            if len(index):
                total.index_add_(0, index, rows.to(total.dtype))

    def keys(self, arrived: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the second call."""
        k, v = (arrived[:, place].index_select(0, self.calls.gather) for place in (0, 1))
        return k, v

    def gradients(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Gradients of the second call's keys -> of the rows that arrived, in their dtype.

        Of a key that several of this rank's runs have seen it is the float32 sum.
        """
        layers = self.calls.layers
        summed = torch.float32 if len(layers) > 1 else dk.dtype
        total = dk.new_zeros((self.calls.num_arriving, 2, *dk.shape[1:]), dtype=summed)
        for start, stop in layers:
            index = self.calls.gather[start:stop]
            for place, part in enumerate((dk, dv)):
                total[:, place].index_add_(0, index, part[start:stop].to(summed))
        return total.to(dk.dtype)

    def _start(self, sent: Tensor, counts: list[int], coming: list[int]) -> Arriving:
        rows = sent.new_empty((sum(coming), *sent.shape[1:]))
        row_bytes = sent.element_size() * sent[0:1].shape[1:].numel()
        self.tracer.sent((sum(counts) - counts[self.rank]) * row_bytes)
        # As bytes, which every backend moves, whatever the dtype.
        work = dist.all_to_all_single(
            rows.flatten(1).view(torch.uint8),
            sent.flatten(1).view(torch.uint8),
            coming,
            counts,
            group=self.group,
            async_op=True,
        )
        return Arriving(rows, sent, work, self.tracer)
