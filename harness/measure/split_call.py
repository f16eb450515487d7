"""An attention call whose sequences are split over ranks (context parallelism)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.cases.case import Case
from harness.measure.attention_calls import CheckedPart, self_attention_packing
from kernels import AttentionProblem, AttentionSpec
from kernels.reference import ROWS
from parallel.context.blocks.layouts import Layout
from parallel.context.bound import SplitAttention

KEYS_CHECKED_UP_TO = 16_384
"""Beyond this length only the last keys are checked, which few queries see: the float64 gradient
of other keys takes time that grows with the square of the length."""


class SplitCall:
    """An :class:`~harness.measure.attention_calls.AttentionCall` of this rank's part of q, k, v.

    All ranks draw the same whole sequences, and each keeps its part.

    Args:
        lengths: tokens of each sequence of a packed batch; None for a dense one.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        attention: SplitAttention,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.problem = case.attention_problem
        self._device = device
        self._attention = attention
        self._lengths = lengths
        self._packing = None if lengths is None else self_attention_packing(lengths, device)
        # A generator of its own: ranks may have drawn different numbers from the global one.
        self._generator = torch.Generator(device).manual_seed(case.seed + 1)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        problem = self.problem
        q, k, v = (
            self._part(heads).requires_grad_(problem.needs_grad)
            for heads in (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads)
        )
        return q, k, v

    def output_gradient(self, o: Tensor) -> Tensor:
        # Zero for padding, whose output is never used.
        return self._part(self.problem.num_heads)

    def _part(self, heads: int) -> Tensor:
        """This rank's part of a random tensor of ``heads`` heads."""
        problem, layout, rank = self.problem, self._attention.layout, self._attention.rank
        if self._lengths is None:
            shape: tuple[int, ...]
            shape = (problem.batch_size, heads, problem.q_len, problem.head_dim)
        else:
            shape = (sum(self._lengths), heads, problem.head_dim)
        whole = torch.randn(
            shape,
            generator=self._generator,
            device=self._device,
            dtype=getattr(torch, problem.dtype),
        )
        if self._lengths is None:
            return layout.shard(whole, rank, dim=2)
        return layout.shard_packed(whole, self._lengths, rank)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = AttentionSpec(
            causal=self.problem.causal,
            scale=self.problem.head_dim**-0.5,
            packing=self._packing,
        )
        return self._attention.attend(q, k, v, spec)

    def parts(self) -> Iterable[CheckedPart]:
        """Rows of every rank: the end of each of its runs of positions, gathered on all ranks."""
        problem, layout = replace(self.problem, cp=1, packed=False), self._attention.layout
        if self._lengths is None:
            yield _part_of(problem, layout, lambda x: self._whole(x))
            return
        starts = [0, *itertools.accumulate(self._lengths)]
        for index in {len(self._lengths) - 1, self._lengths.index(max(self._lengths))}:
            length = self._lengths[index]
            one = replace(problem, batch_size=1, q_len=length, kv_len=length)
            yield _part_of(one, layout, self._sequence(starts[index], length))

    def _sequence(self, start: int, length: int) -> Callable[[Tensor], Tensor]:
        def take(x: Tensor) -> Tensor:
            return self._whole(x)[start : start + length].transpose(0, 1).unsqueeze(0)

        return take

    def _whole(self, x: Tensor) -> Tensor:
        """The tensor over whole sequences, gathered from all ranks (a collective)."""
        parts = self._attention.all_parts(x)
        if self._lengths is None:
            return self._attention.layout.unshard(parts, 2, self.problem.q_len)
        return self._attention.layout.unshard_packed(parts, self._lengths)

    @property
    def padding(self) -> int:
        """Padding tokens on all ranks together."""
        layout, problem = self._attention.layout, self.problem
        lengths = self._lengths or [problem.q_len] * problem.batch_size
        return sum(layout.padded(length) - length for length in lengths)


def _part_of(
    problem: AttentionProblem, layout: Layout, take: Callable[[Tensor], Tensor]
) -> CheckedPart:
    ends = {
        min(run[-1] + 1, problem.q_len)
        for rank in range(layout.num_ranks)
        for run in layout.runs(rank, problem.q_len)
    }
    rows = [slice(max(0, end - ROWS), end) for end in sorted(ends)]
    rows.append(slice(0, min(ROWS, problem.q_len)))
    keys = rows if problem.q_len <= KEYS_CHECKED_UP_TO else None
    return CheckedPart(problem=problem, take=take, rows=rows, keys=keys)
