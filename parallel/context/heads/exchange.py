"""All-to-all exchange of sequences for heads, and back, one collective each way.

DeepSpeed-Ulysses (Jacobs et al. 2023, section 3.1): a rank sends its tokens of each head to the
rank that attends with it. In a forward pass that is (P-1)/P of its part of q, k, v and o, and in a
backward pass as much of their gradients; k and v go to each rank that needs a copy. A ring sends
k and v P-1 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.tracing import WAIT, Tracer
from parallel.context.heads.sequences import HEAD_DIM, Sequences
from parallel.context.heads.split import HeadSplit


@dataclass(kw_only=True, slots=True, frozen=True)
class Exchange:
    """The exchanges of one pass over tensors of one shape; all ranks make them together."""

    group: dist.ProcessGroup
    rank: int
    split: HeadSplit
    sequences: Sequences
    tracer: Tracer

    def inwards(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's tokens of all heads -> whole sequences of its own heads."""
        ranks = range(self.split.num_ranks)
        rows = [self._rows(x) for x in (q, k, v)]
        heads = [(self.split.q_heads(r), *2 * (self.split.kv_heads(r),)) for r in ranks]
        sent = torch.cat(
            [x[own.start : own.stop] for kinds in heads for x, own in zip(rows, kinds, strict=True)]
        )
        counts = [sum(map(len, kinds)) for kinds in heads]
        here = [len(kind) for kind in heads[self.rank]]
        got = self._all_to_all(sent, counts, [sum(here)] * len(ranks), step=0)
        del sent
        parts = got.unflatten(0, (len(ranks), -1)).split(here, dim=1)
        whole_q, whole_k, whole_v = (self.sequences.join(part) for part in parts)
        return whole_q, whole_k, whole_v

    def inwards_as_queries(self, x: Tensor) -> Tensor:
        """:meth:`inwards` for one tensor with the heads of q, such as the gradient of o."""
        ranks = range(self.split.num_ranks)
        counts = [len(self.split.q_heads(rank)) for rank in ranks]
        sent = self._rows(x).contiguous()
        got = self._all_to_all(sent, counts, [counts[self.rank]] * len(ranks), step=0)
        return self.sequences.join(got.unflatten(0, (len(ranks), -1)))

    def outwards_as_queries(self, x: Tensor) -> Tensor:
        """Whole sequences of this rank's query heads -> its own tokens of all of them."""
        ranks = range(self.split.num_ranks)
        counts = [len(self.split.q_heads(rank)) for rank in ranks]
        sent = self.sequences.cut(x).flatten(0, 1)
        got = self._all_to_all(sent, [counts[self.rank]] * len(ranks), counts, step=1)
        return self._from_rows(got)

    def outwards(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of :meth:`inwards`; of a key head on several ranks, their float32 sum."""
        ranks = range(self.split.num_ranks)
        heads = [(self.split.q_heads(r), *2 * (self.split.kv_heads(r),)) for r in ranks]
        sent = torch.cat([self.sequences.cut(x) for x in (dq, dk, dv)], dim=1).flatten(0, 1)
        counts = [sum(map(len, kinds)) for kinds in heads]
        got = self._all_to_all(sent, [counts[self.rank]] * len(ranks), counts, step=1)
        del sent
        parts = got.split([len(kind) for kinds in heads for kind in kinds])
        own_dq = self._from_rows(torch.cat(parts[0::3]))
        own_dk, own_dv = (self._from_rows(self._sum(parts[kind::3])) for kind in (1, 2))
        return own_dq, own_dk, own_dv

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows of all key heads from those that each rank attended with, in rank order."""
        if not self.split.shares_kv_heads:
            return torch.cat(list(parts))
        shape = (self.split.num_kv_heads, *parts[0].shape[1:])
        total = parts[0].new_zeros(shape, dtype=torch.float32)
        for rank, part in enumerate(parts):
            own = self.split.kv_heads(rank)
            total[own.start : own.stop] += part
        return total.to(parts[0].dtype)

    def _rows(self, x: Tensor) -> Tensor:
        return x.transpose(0, HEAD_DIM)

    def _from_rows(self, rows: Tensor) -> Tensor:
        return rows.transpose(0, HEAD_DIM).contiguous()

    def _all_to_all(
        self, sent: Tensor, counts: Sequence[int], coming: Sequence[int], *, step: int
    ) -> Tensor:
        """Rows for each rank, ``counts`` of them -> rows from each, ``coming`` of them."""
        got = sent.new_empty((sum(coming), *sent.shape[1:]))
        row_bytes = sent[0].nbytes
        self.tracer.sent((sum(counts) - counts[self.rank]) * row_bytes)
        with self.tracer.span(WAIT, step):
            # As bytes, which every backend moves, whatever the dtype.
            dist.all_to_all_single(
                got.view(torch.uint8),
                sent.view(torch.uint8),
                list(coming),
                list(counts),
                group=self.group,
            )
        return got
