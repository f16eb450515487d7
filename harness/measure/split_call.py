"""The attention call over several ranks that hold parts of the same sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.cases.case import Case
from harness.measure.check import Part
from kernels import AttentionProblem, Packing
from kernels.reference import ROWS
from parallel.context.blocks.layouts import Layout
from parallel.context.bound import SplitAttention

KEYS_CHECKED_UP_TO = 16_384
"""Longer sequences have their last keys checked alone, which only the last queries see: others
take time that grows with the square of the length, in float64."""


class SplitCall:
    """q, k and v of whole sequences, equal on all ranks, of which each holds its part.

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
        self._packing = None if lengths is None else _packing(lengths, device)
        # Not the seed of the whole process: ranks may have drawn different numbers from that.
        self._generator = torch.Generator(device).manual_seed(case.seed + 1)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        problem = self.problem
        q, k, v = (
            self._part(heads).requires_grad_(problem.needs_grad)
            for heads in (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads)
        )
        return q, k, v

    def output_gradient(self, o: Tensor) -> Tensor:
        # Padding has none: what a padded query gives, nobody looks at.
        return self._part(self.problem.num_heads)

    def _part(self, heads: int) -> Tensor:
        """This rank's part of a random tensor with so many heads."""
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
        options: dict[str, Any] = {
            "causal": self.problem.causal,
            "scale": self.problem.head_dim**-0.5,
        }
        if self._packing is None:
            return self._attention.attend(q, k, v, **options)
        return self._attention.attend_packed(q, k, v, self._packing, **options)

    def parts(self) -> Iterable[Part]:
        """Every rank's tokens: the end of each run of positions, gathered from all ranks."""
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
        """A tensor of the call over whole sequences; all ranks ask for the same one."""
        parts = self._attention.all_parts(x)
        if self._lengths is None:
            return self._attention.layout.unshard(parts, 2, self.problem.q_len)
        return self._attention.layout.unshard_packed(parts, self._lengths)

    @property
    def padding(self) -> int:
        """Tokens that all ranks hold beyond those of the batch."""
        layout, problem = self._attention.layout, self.problem
        lengths = self._lengths or [problem.q_len] * problem.batch_size
        return sum(layout.padded(length) - length for length in lengths)


def _part_of(problem: AttentionProblem, layout: Layout, take: Callable[[Tensor], Tensor]) -> Part:
    ends = {
        min(run[-1] + 1, problem.q_len)
        for rank in range(layout.num_ranks)
        for run in layout.runs(rank, problem.q_len)
    }
    rows = [slice(max(0, end - ROWS), end) for end in sorted(ends)]
    rows.append(slice(0, min(ROWS, problem.q_len)))
    keys = rows if problem.q_len <= KEYS_CHECKED_UP_TO else None
    return Part(problem=problem, take=take, rows=rows, keys=keys)


def _packing(lengths: Sequence[int], device: torch.device) -> Packing:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return Packing(cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest)
