"""Schemes that exchange heads among neighbouring ranks, and keys between groups of them.

With u ranks to a group and P/u groups (USP, Fang and Zhao 2024; LoongTrain, Gu et al. 2024): a rank
sends its tokens of all heads but its own to u - 1 neighbours, as Ulysses does, and a ring of P/u
ranks has u times fewer hops than one of P, with 1/u of the heads. So there may be u times as many
ranks as heads, and a part of a sequence is as long as for a ring of P/u.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist

from kernels import AttentionProblem
from kernels.problem import MASKS
from kernels.registry import joined_later
from parallel.context import bound
from parallel.context.attention import (
    SYMMETRIC,
    RingAttention,
    SequenceParallelAttention,
    why_not_peers,
    why_not_prefix,
    why_not_symmetric,
)
from parallel.context.blocks.layouts import Contiguous, Layout
from parallel.context.heads import groups, memory, mesh
from parallel.context.heads.all_to_all import AllToAll
from parallel.context.heads.nested import Nested
from parallel.context.heads.split import HeadSplit, shapes_of_pieces
from parallel.context.heads.symmetric import SymmetricHeads
from parallel.context.schemes.ulysses import ALL_TO_ALL, Ulysses, check_head_groups

_MOST_INNER = 8
"""Ranks of a group that are chosen without being asked for: the GPUs of most hosts, and as many as
most models have key heads; of more, a part would need copies of them."""


@dataclass(kw_only=True, slots=True)
class HybridAttention(SequenceParallelAttention):
    """Ulysses inside groups of ranks and a ring between them; one of both where one is left."""

    transport: str = "auto"
    """How keys travel between groups, as in a ring. Heads are exchanged by reads of peers' memory
    (symmetric), too, and by a collective where keys are sent as messages (send_recv)."""
    ulysses: int = 0
    """Neighbouring ranks that exchange heads, a divisor of parallel.cp; 0 is the largest one below
    it, up to 8."""
    head_groups: int = joined_later(1)
    """Groups in which a rank attends with its heads, at most as many as it has; the next group is
    exchanged while one is computed. More than a rank has key heads copy a key head for each."""

    ring_type: ClassVar[type[RingAttention]]
    takes: ClassVar[frozenset[str]] = frozenset(MASKS)

    def __post_init__(self) -> None:
        SequenceParallelAttention.__post_init__(self)
        self._ring()
        check_head_groups(self.head_groups)
        if self.ulysses < 0:
            raise ValueError(
                f"attention.ulysses={self.ulysses}: must be a divisor of parallel.cp, or 0 for "
                "the largest below it"
            )

    def inner_degree(self, num_ranks: int) -> int:
        """Ranks of a group. Raises ValueError unless it divides ``num_ranks``."""
        if num_ranks == 1:
            return 1
        if self.ulysses:
            reason = self._why_not_divided(num_ranks)
            if reason is not None:
                raise ValueError(reason)
            return self.ulysses
        most = min(num_ranks - 1, _MOST_INNER)
        return max(size for size in range(1, most + 1) if num_ranks % size == 0)

    def _why_not_divided(self, num_ranks: int) -> str | None:
        if not self.ulysses or num_ranks % self.ulysses == 0:
            return None
        return f"attention.ulysses={self.ulysses}: must divide parallel.cp={num_ranks}"

    def layout(self, num_ranks: int) -> Layout:
        size, outer = self.inner_degree(num_ranks), self.group_layout(num_ranks)
        if size == 1:
            return outer
        if size == num_ranks:
            return Contiguous(num_ranks=num_ranks)
        return Nested(num_ranks=num_ranks, outer=outer)

    def group_layout(self, num_ranks: int) -> Layout:
        return self._ring().layout(num_ranks // self.inner_degree(num_ranks))

    def head_split(self, num_ranks: int, num_heads: int, num_kv_heads: int) -> HeadSplit:
        """The heads of each rank of a group."""
        return HeadSplit(
            num_ranks=self.inner_degree(num_ranks), num_heads=num_heads, num_kv_heads=num_kv_heads
        )

    def choice(self, problem: AttentionProblem) -> str:
        if problem.cp == 1:
            return self.on_one_device.choice(problem)
        size = self.inner_degree(problem.cp)
        mesh = f"{problem.cp // size} x {size} ranks"
        # Where the mesh has one axis, what does not happen.
        idle = {1: ", no heads exchanged", problem.cp: ", no keys travel"}.get(size, "")
        kernel, transport = self.kernel_of(problem), self.transport_of(problem)
        groups = f", head_groups={self.head_groups}" if self.head_groups > 1 < size else ""
        return f"{self.name}(kernel={kernel}, transport={transport}, {mesh}{idle}{groups})"

    def kernel_of(self, problem: AttentionProblem) -> str:
        alone = self._alone(problem.cp)
        return (
            alone.kernel_of(problem) if alone else self._ring().kernel_of(self._calls(problem)[0])
        )

    def transport_of(self, problem: AttentionProblem) -> str:
        # Whether all ranks of the mesh are on one host; a ring's may be, and not the next one's.
        return (self._alone(problem.cp) or self._ring()).transport_of(problem)

    def why_not_split(self, problem: AttentionProblem) -> str | None:
        reason = self._why_not_divided(problem.cp)
        if reason is not None:
            return reason
        if self.head_groups > 1 and self.inner_degree(problem.cp) == 1 < problem.cp:
            return (
                f"attention.head_groups={self.head_groups}: groups of one rank exchange no heads; "
                "leave it out, or set attention.ulysses="
            )
        alone = self._alone(problem.cp)
        if alone is not None:
            return alone.why_not_split(problem)
        size, multiple = self.inner_degree(problem.cp), self.layout(problem.cp).multiple
        if problem.q_len != problem.kv_len:
            return "queries and keys of a split sequence are the same tokens, equally many"
        if problem.num_heads < size:
            return (
                f"{problem.num_heads} query heads are too few for groups of {size} ranks, which "
                "attend with at least one each; attention.ulysses= sets how many"
            )
        split = self.head_split(problem.cp, problem.num_heads, problem.num_kv_heads)
        reason = split.why_not_groups(self.head_groups)
        if reason is not None:
            return reason
        reasons = [self._ring().why_not_split(call) for call in self._calls(problem)]
        if self.transport_of(problem) == SYMMETRIC:
            reasons.append(why_not_symmetric(problem))
        if not problem.causal and problem.q_len % multiple:
            reasons.append(
                f"{problem.q_len} tokens do not divide by {multiple}, and without a causal "
                "mask the padding would be attended to"
            )
        reasons.append(why_not_prefix(problem, self.layout(problem.cp)))
        return next(filter(None, reasons), None)

    def _calls(self, problem: AttentionProblem) -> list[AttentionProblem]:
        """The problems that rings solve, without repetitions; the one of most heads first."""
        split = self.head_split(problem.cp, problem.num_heads, problem.num_kv_heads)
        length = self.layout(problem.cp).padded(problem.q_len)
        return [
            replace(
                problem,
                cp=problem.cp // split.num_ranks,
                num_heads=heads,
                num_kv_heads=kv_heads,
                q_len=length,
                kv_len=length,
            )
            for heads, kv_heads in shapes_of_pieces(split.in_groups(self.head_groups))
        ]

    def split_peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Of the fullest rank: the peak of its ring, and what the exchanges hold beside it.

        None where the ranks or heads do not make up a mesh: plans predict before anything is asked
        whether it is supported.
        """
        if self._why_not_divided(problem.cp) is not None:
            return None
        if problem.num_heads < self.inner_degree(problem.cp):
            return None
        alone = self._alone(problem.cp)
        if alone is not None:
            return alone.split_peak_memory(problem)
        split = self.head_split(problem.cp, problem.num_heads, problem.num_kv_heads)
        whole, ring = self._calls(problem)[0], self._ring()

        def attended(num_heads: int, num_kv_heads: int) -> dict[str, float] | None:
            call = replace(whole, num_heads=num_heads, num_kv_heads=num_kv_heads)
            return ring.split_peak_memory(call)

        layout, symmetric = self.layout(problem.cp), ring.predicted_symmetric(problem)
        return memory.peak(
            problem, layout, split, attended, num_groups=self.head_groups, published=symmetric
        )

    def _ring(self, transport: str = "") -> RingAttention:
        """The scheme between groups."""
        return self.ring_type(
            name=self.name, kernel=self.kernel, transport=transport or self.transport
        )

    def _alone(self, num_ranks: int) -> SequenceParallelAttention | None:
        """The scheme of a mesh with one axis; None if it has two."""
        size = self.inner_degree(num_ranks)
        if size == 1:
            return self._ring()
        if size < num_ranks:
            return None
        return Ulysses(
            name=self.name,
            kernel=self.kernel,
            transport=self._transport_of_heads(),
            head_groups=self.head_groups,
        )

    def _transport_of_heads(self) -> str:
        """Ulysses' transport where keys would travel with this one."""
        return ALL_TO_ALL if self.transport == self.ring_type.transports[0] else self.transport

    @contextlib.contextmanager
    def bind(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> Iterator[bound.SplitAttention]:
        alone = self._alone(group.size())
        if alone is not None:
            with alone.bind(group, device) as found:
                yield found
            return
        layout = self.layout(group.size())
        assert isinstance(layout, Nested), "a mesh has two axes"
        ring = self._ring(self._transport(group, device))
        with (
            mesh.head_mesh(group, layout.inner_degree, device) as ranks,
            ring.bind(ranks.ring, device) as between,
        ):
            reads = ring.transport == SYMMETRIC
            heads = SymmetricHeads(ranks.inner, device) if reads else AllToAll(ranks.inner)
            yield groups.GroupAttention(between, layout, ranks, group, heads, self.head_groups)

    def _transport(self, group: dist.ProcessGroup, device: torch.device) -> str:
        if self.transport != "auto":
            return self.transport
        direct = device.type == "cuda" and why_not_peers(group.size()) is None
        return SYMMETRIC if direct else self.ring_type.transports[0]
