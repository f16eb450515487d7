"""attention=ulysses: sequences exchanged for heads (DeepSpeed-Ulysses, Jacobs et al. 2023).

Each rank holds contiguous parts of all sequences. Before attention they are exchanged, all to all,
for whole sequences of some of the heads, and the results are exchanged back: what a rank sends
shrinks with the number of ranks, and any kernel computes as on one device: in one call where each
rank has whole groups of query heads or parts of one, else in up to three. There may be at most as
many ranks as query heads. A key head that several ranks need is copied to all of them.

Over symmetric memory a rank reads the tokens of its heads out of the others' memory, straight to
their places in whole sequences. With ``attention.head_groups=`` a rank attends with its heads in
groups, and exchanges the next group while it computes with one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist

from kernels import AttentionProblem, attention_backend
from kernels.backends.auto import choose
from kernels.problem import MASKS
from kernels.registry import Look, joined_later
from parallel.context import bound
from parallel.context.attention import SYMMETRIC, TransportedAttention, why_not_prefix
from parallel.context.blocks.layouts import Contiguous, Layout
from parallel.context.heads import head_attention
from parallel.context.heads.all_to_all import AllToAll
from parallel.context.heads.split import HeadSplit, shapes_of_pieces
from parallel.context.heads.symmetric import SymmetricHeads

ALL_TO_ALL = "all_to_all"
"""The transport of one collective each way."""


def check_head_groups(head_groups: int) -> None:
    """Raise ValueError, naming the full key, unless a rank can have so many groups."""
    if head_groups < 1:
        raise ValueError(f"attention.head_groups={head_groups}: must be at least 1")


@attention_backend("ulysses", look=Look(colour="#999933", marker="h", place=15))
@dataclass(kw_only=True, slots=True)
class Ulysses(TransportedAttention):
    """A kernel over whole sequences of a rank's share of the heads."""

    transport: str = "auto"
    """How tokens travel: one collective each way (all_to_all), or reads of peers' memory
    (symmetric), which auto chooses where GPUs can."""
    head_groups: int = joined_later(1)
    """Groups in which a rank attends with its heads, at most as many as it has; the next group is
    exchanged while one is computed. More than a rank has key heads copy a key head for each."""

    transports: ClassVar[tuple[str, ...]] = (ALL_TO_ALL, SYMMETRIC)
    takes: ClassVar[frozenset[str]] = frozenset(MASKS)

    def __post_init__(self) -> None:
        TransportedAttention.__post_init__(self)
        check_head_groups(self.head_groups)

    def layout(self, num_ranks: int) -> Layout:
        return Contiguous(num_ranks=num_ranks)

    def head_split(self, num_ranks: int, num_heads: int, num_kv_heads: int) -> HeadSplit:
        return HeadSplit(num_ranks=num_ranks, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def choice(self, problem: AttentionProblem) -> str:
        if problem.cp == 1:
            return self.on_one_device.choice(problem)
        kernel, transport = self.kernel_of(problem), self.transport_of(problem)
        groups = f", head_groups={self.head_groups}" if self.head_groups > 1 else ""
        return f"{self.name}(kernel={kernel}, transport={transport}{groups})"

    def kernel_of(self, problem: AttentionProblem) -> str:
        if self.kernel != "auto":
            return self.kernel
        return choose(self._calls(problem)[0], with_lse=False).name

    def why_not_split(self, problem: AttentionProblem) -> str | None:
        if problem.q_len != problem.kv_len:
            return "queries and keys of a split sequence are the same tokens, equally many"
        if problem.num_heads < problem.cp:
            return (
                f"{problem.num_heads} query heads are too few for {problem.cp} ranks, which attend "
                "with at least one each"
            )
        split = self.head_split(problem.cp, problem.num_heads, problem.num_kv_heads)
        reason = split.why_not_groups(self.head_groups) or self.why_not_transport(problem)
        if reason is not None:
            return reason
        if not problem.causal and problem.q_len % problem.cp:
            return (
                f"{problem.q_len} tokens do not divide by {problem.cp}, and without a causal "
                "mask the padding would be attended to"
            )
        for call in self._calls(problem):
            reason = self.on_one_device.why_unsupported(call)
            if reason is not None:
                return f"attention.kernel={self.kernel}: {reason}"
        return why_not_prefix(problem, self.layout(problem.cp))

    def _calls(self, problem: AttentionProblem) -> list[AttentionProblem]:
        """The kernel calls of all ranks, without repetitions; the largest first."""
        split = self.head_split(problem.cp, problem.num_heads, problem.num_kv_heads)
        length = problem.q_len if problem.packed else self.layout(problem.cp).padded(problem.q_len)
        return [
            replace(
                problem,
                cp=1,
                num_heads=heads,
                num_kv_heads=kv_heads,
                q_len=length,
                kv_len=length,
            )
            for heads, kv_heads in shapes_of_pieces(split.in_groups(self.head_groups))
        ]

    def split_peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Of the fullest rank, by :mod:`parallel.context.heads.memory`."""
        from parallel.context.heads import memory

        split = self.head_split(problem.cp, problem.num_heads, problem.num_kv_heads)
        whole = self._calls(problem)[0]

        def attended(num_heads: int, num_kv_heads: int) -> dict[str, float] | None:
            call = replace(whole, num_heads=num_heads, num_kv_heads=num_kv_heads)
            return self.on_one_device.peak_memory(call)

        layout, symmetric = self.layout(problem.cp), self.predicted_symmetric(problem)
        return memory.peak(
            problem, layout, split, attended, num_groups=self.head_groups, published=symmetric
        )

    @contextlib.contextmanager
    def bind(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> Iterator[bound.SplitAttention]:
        reads = group.size() > 1 and self.reads_peers(group, device)
        yield head_attention.HeadAttention(
            self.on_one_device,
            self.layout(group.size()),
            group,
            SymmetricHeads(group, device) if reads else AllToAll(group),
            self.head_groups,
        )
