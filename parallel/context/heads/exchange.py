"""Exchanges of sequences for heads, and back: what they have in common, whatever the transport.

DeepSpeed-Ulysses (Jacobs et al. 2023, section 3.1): a rank sends its tokens of each head to the
rank that attends with it. In a forward pass that is (P-1)/P of its part of q, k, v and o, and in a
backward pass as much of their gradients; k and v go to each rank that needs a copy. A ring sends
k and v P-1 times.

A rank may attend with its heads in several groups, one after another: the exchange of the next
group then hides behind the kernel of this one, and only the first group's inputs and the last
group's results are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from parallel.context.blocks.tracing import Tracer
from parallel.context.heads.sequences import Sequences
from parallel.context.heads.split import HeadSplit

Kind = Callable[[HeadSplit, int], range]
"""Which heads of a tensor a share of the heads has."""

Kinds = tuple[Kind, ...]
"""The heads of several tensors that are exchanged together."""

INPUTS: Kinds = (HeadSplit.q_heads, HeadSplit.kv_heads, HeadSplit.kv_heads)
"""The heads of q, k and v, and of their gradients."""
QUERIES: Kinds = (HeadSplit.q_heads,)
"""The heads of o, its gradient, or the lse."""


class ExchangePlan:
    """What the exchanges of tensors of one shape have in common, made once.

    The heads of all ranks are split into as many shares as there are groups on all of them; those
    of one rank follow each other.

    Args:
        split: the heads of each rank.
        num_groups: groups in which a rank attends with its heads; at most as many as it has.

    Attributes:
        shares: the heads of each share.
    """

    def __init__(
        self, rank: int, split: HeadSplit, sequences: Sequences, num_groups: int = 1
    ) -> None:
        self.rank, self.num_ranks, self.num_groups = rank, split.num_ranks, num_groups
        self.sequences = sequences
        self.shares = split.in_groups(num_groups)
        numbers = range(self.shares.num_ranks)
        self._heads = {kind: [kind(self.shares, n) for n in numbers] for kind in INPUTS}
        self._counts = {
            (kinds, group): [
                sum(len(self.heads(kind, other, group)) for kind in kinds)
                for other in range(self.num_ranks)
            ]
            for kinds in (INPUTS, QUERIES)
            for group in self.groups
        }
        self._sizes = {
            kinds: {tuple(len(self._heads[kind][number]) for kind in kinds) for number in numbers}
            for kinds in (INPUTS, QUERIES)
        }
        self.pieces = [self.shares.pieces(self._share(rank, group)) for group in self.groups]
        """For each group, the kernel calls of this rank."""

    @property
    def groups(self) -> range:
        return range(self.num_groups)

    def order(self, *, last_first: bool) -> Sequence[int]:
        """The groups in the order in which they are exchanged."""
        return self.groups[::-1] if last_first else self.groups

    @property
    def peers(self) -> list[int]:
        """All ranks from this one on, so that at each step every rank is another's."""
        return [(self.rank - step) % self.num_ranks for step in range(self.num_ranks)]

    def heads(self, kind: Kind, rank: int, group: int) -> range:
        """The heads with which ``rank`` attends in a group."""
        return self._heads[kind][self._share(rank, group)]

    def first_head(self, group: int) -> int:
        """The first query head of this rank's group."""
        return self.heads(HeadSplit.q_heads, self.rank, group).start

    def counts(self, kinds: Kinds, group: int) -> list[int]:
        """Heads of all these kinds together, for each rank."""
        return self._counts[kinds, group]

    def sizes(self, kinds: Kinds) -> set[tuple[int, ...]]:
        """Numbers of heads of these kinds that any rank attends with in a group."""
        return self._sizes[kinds]

    def columns(self, kind: Kind) -> list[tuple[int, int, range]]:
        """Rank, group and heads of each share, in the order of the heads."""
        ranks = range(self.num_ranks)
        return [(r, group, self.heads(kind, r, group)) for r in ranks for group in self.groups]

    def repeats(self, kind: Kind) -> bool:
        """Whether a head is in several shares, so that its gradients are summed."""
        return kind is HeadSplit.kv_heads and self.shares.shares_kv_heads

    def _share(self, rank: int, group: int) -> int:
        return rank * self.num_groups + group


class Arriving(Protocol):
    """Whole sequences of a group's heads, on their way here."""

    def wait(self) -> Sequence[Tensor]:
        """The tensors; on CUDA the current stream waits, not the host. To be called once."""
        ...


class Leaving(Protocol):
    """Whole sequences of this rank's heads, on their way to the ranks that hold the tokens."""

    def send(self, group: int, whole: Sequence[Tensor]) -> None:
        """Start to send a group's tensors; they are not written to until :meth:`collect`."""
        ...

    def collect(self) -> Sequence[Tensor]:
        """This rank's tokens of all heads, once every group has been sent.

        Of a head in several shares it is the float32 sum.
        """
        ...


class HeadExchange(Protocol):
    """The exchanges of one pass; all ranks of the group make them together, in the same order."""

    def inwards(
        self, kinds: Kinds, tensors: Sequence[Tensor], *, last_first: bool = False
    ) -> Sequence[Arriving]:
        """Start to exchange this rank's tokens of all heads, of each kind, group after group.

        A backward pass computes the last group first, and so exchanges it first
        (``last_first``). What is returned is in the order of the groups either way.
        """
        ...

    def outwards(self, kinds: Kinds, like: Tensor) -> Leaving:
        """The way back, for tensors of the form of this rank's ``like`` but for their heads."""
        ...


class HeadTransport(Protocol):
    """How the ranks of a group exchange heads; what it keeps outlives a pass."""

    @property
    def outside_bytes(self) -> int:
        """Bytes of device memory that it holds and PyTorch's allocator does not count."""
        ...

    def exchange(self, plan: ExchangePlan, tracer: Tracer) -> HeadExchange:
        """The exchanges of a new pass."""
        ...


def summed_columns(columns: Sequence[tuple[range, Tensor]], num_heads: int, dim: int) -> Tensor:
    """Sum the parts of heads in float32, in their order, and round once.

    Args:
        columns: heads, and a tensor with those heads along ``dim``.
    """
    first = columns[0][1]
    shape = (*first.shape[:dim], num_heads, *first.shape[dim + 1 :])
    total = first.new_zeros(shape, dtype=torch.float32)
    for heads, part in columns:
        total.narrow(dim, heads.start, len(heads)).add_(part)
    return total.to(first.dtype)
