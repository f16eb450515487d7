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


class ExchangePlan:
    """What the exchanges of tensors of one shape have in common, made once.

    Attributes:
        pieces: the kernel calls of this rank.
    """

    def __init__(self, rank: int, split: HeadSplit, sequences: Sequences) -> None:
        ranks = range(split.num_ranks)
        self.rank, self.split, self.sequences = rank, split, sequences
        self.pieces = split.pieces(rank)
        self.heads = [(split.q_heads(r), *2 * (split.kv_heads(r),)) for r in ranks]
        """Heads of q, k and v that each rank attends with."""
        self.sizes = [[len(kind) for kind in kinds] for kinds in self.heads]
        """How many those are."""
        self.counts = [sum(kinds) for kinds in self.sizes]
        self.q_counts = [kinds[0] for kinds in self.sizes]
        self.own_counts = [self.counts[rank]] * len(ranks)
        self.own_q_counts = [self.q_counts[rank]] * len(ranks)
        self.all_sizes = [size for kinds in self.sizes for size in kinds]


@dataclass(kw_only=True, slots=True, frozen=True)
class Exchange:
    """The exchanges of one pass; all ranks make them together."""

    group: dist.ProcessGroup
    plan: ExchangePlan
    tracer: Tracer

    def inwards(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's tokens of all heads -> whole sequences of its own heads."""
        plan = self.plan
        rows = [_rows(x) for x in (q, k, v)]
        sent = torch.cat(
            [
                x[own.start : own.stop]
                for kinds in plan.heads
                for x, own in zip(rows, kinds, strict=True)
            ]
        )
        got = self._all_to_all(sent, plan.counts, plan.own_counts, step=0)
        del sent
        parts = got.unflatten(0, (len(plan.counts), -1)).split(plan.sizes[plan.rank], dim=1)
        whole_q, whole_k, whole_v = (plan.sequences.join(part) for part in parts)
        return whole_q, whole_k, whole_v

    def inwards_as_queries(self, x: Tensor) -> Tensor:
        """:meth:`inwards` for one tensor with the heads of q, such as the gradient of o."""
        plan = self.plan
        sent = _rows(x).contiguous()
        got = self._all_to_all(sent, plan.q_counts, plan.own_q_counts, step=0)
        return plan.sequences.join(got.unflatten(0, (len(plan.q_counts), -1)))

    def outwards_as_queries(self, x: Tensor) -> Tensor:
        """Whole sequences of this rank's query heads -> its own tokens of all of them."""
        plan = self.plan
        sent = plan.sequences.cut(x).flatten(0, 1).contiguous()
        got = self._all_to_all(sent, plan.own_q_counts, plan.q_counts, step=1)
        return _rows(got).contiguous()

    def outwards(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of :meth:`inwards`; of a key head on several ranks, their float32 sum."""
        plan = self.plan
        sent = torch.cat([plan.sequences.cut(x) for x in (dq, dk, dv)], dim=1).flatten(0, 1)
        got = self._all_to_all(sent, plan.own_counts, plan.counts, step=1)
        del sent
        parts = got.split(plan.all_sizes)
        own_dq = _joined_rows(parts[0::3])
        own_dk, own_dv = (self._sum(parts[kind::3]) for kind in (1, 2))
        return own_dq, own_dk, own_dv

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        """All key heads from those that each rank attended with, in rank order."""
        split = self.plan.split
        if not split.shares_kv_heads:
            return _joined_rows(parts)
        shape = (split.num_kv_heads, *parts[0].shape[1:])
        total = parts[0].new_zeros(shape, dtype=torch.float32)
        for kinds, part in zip(self.plan.heads, parts, strict=True):
            total[kinds[1].start : kinds[1].stop] += part
        return _rows(total.to(parts[0].dtype)).contiguous()

    def _all_to_all(
        self, sent: Tensor, counts: Sequence[int], coming: Sequence[int], *, step: int
    ) -> Tensor:
        """Rows for each rank, ``counts`` of them -> rows from each, ``coming`` of them."""
        got = sent.new_empty((sum(coming), *sent.shape[1:]))
        row_bytes = sent[0].nbytes
        self.tracer.sent((sum(counts) - counts[self.plan.rank]) * row_bytes)
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


def _rows(x: Tensor) -> Tensor:
    """Tokens of heads -> heads of tokens, and back."""
    return x.transpose(0, HEAD_DIM)


def _joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows of some heads each -> tokens of all of these heads, in one operation."""
    return torch.cat([_rows(part) for part in parts], HEAD_DIM)
