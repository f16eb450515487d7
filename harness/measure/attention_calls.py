"""One attention call on one rank: its inputs, the call itself, and which of its parts to check.

The batch is dense, or packed: its sequences end to end, with a list of where each begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from harness.cases.case import Case
from kernels import Attention, AttentionProblem, AttentionSpec, Packing


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckedPart:
    """A dense part of a call, small enough to compare with float64 in places."""

    problem: AttentionProblem
    take: Callable[[Tensor], Tensor]
    """Takes this part, [B, H, S, D], out of a tensor of the call."""
    rows: Sequence[slice] | None = None
    """Rows of o and dq to compare; None is the first and the last."""
    keys: Sequence[slice] | None = None
    """Rows of dk and dv to compare; None is the last."""


class AttentionCall(Protocol):
    """An attention call to check and measure: dense, packed, or split over ranks."""

    problem: AttentionProblem

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v on the device, which require grad if the problem does."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def output_gradient(self, o: Tensor) -> Tensor:
        """A random gradient of the output."""
        ...

    def parts(self) -> Iterable[CheckedPart]:
        """The parts to compare with float64."""
        ...


class DenseCall:
    """q [B, H, S, D] and k, v [B, H_kv, S_k, D] through the case's attention.

    Args:
        sequence_major: store the tensors as the transformer does, [B, S, H, D] underneath.
    """

    def __init__(self, case: Case, device: torch.device, *, sequence_major: bool) -> None:
        self.problem = case.attention_problem
        self._case = case
        self._device = device
        self._sequence_major = sequence_major

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        problem = self.problem
        return (
            self._random(problem.num_heads, problem.q_len),
            self._random(problem.num_kv_heads, problem.kv_len),
            self._random(problem.num_kv_heads, problem.kv_len),
        )

    def _random(self, heads: int, seq: int) -> Tensor:
        problem = self.problem
        order = (seq, heads) if self._sequence_major else (heads, seq)
        shape = (problem.batch_size, *order, problem.head_dim)
        x = torch.randn(shape, device=self._device, dtype=getattr(torch, problem.dtype))
        x = x.transpose(1, 2) if self._sequence_major else x
        return x.requires_grad_(problem.needs_grad)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        problem = self.problem
        spec = AttentionSpec(causal=problem.causal, scale=problem.head_dim**-0.5)
        return self._case.attention.role(Attention).attend(q, k, v, spec)

    def output_gradient(self, o: Tensor) -> Tensor:
        return torch.randn_like(o)

    def parts(self) -> Iterable[CheckedPart]:
        return [CheckedPart(problem=self.problem, take=lambda x: x)]


class PackedCall:
    """q [T, H, D] and k, v [T, H_kv, D] through the case's attention.

    Args:
        lengths: tokens of each sequence, as many queries as keys.
    """

    def __init__(self, case: Case, device: torch.device, lengths: Sequence[int]) -> None:
        self.problem = case.attention_problem
        self._case = case
        self._device = device
        self._starts = [0, *itertools.accumulate(lengths)]
        self._packing = self_attention_packing(lengths, device)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        problem = self.problem
        return (
            self._random(problem.num_heads),
            self._random(problem.num_kv_heads),
            self._random(problem.num_kv_heads),
        )

    def _random(self, heads: int) -> Tensor:
        problem = self.problem
        shape = (self._starts[-1], heads, problem.head_dim)
        x = torch.randn(shape, device=self._device, dtype=getattr(torch, problem.dtype))
        return x.requires_grad_(problem.needs_grad)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        problem = self.problem
        spec = AttentionSpec(
            causal=problem.causal, scale=problem.head_dim**-0.5, packing=self._packing
        )
        return self._case.attention.role(Attention).attend(q, k, v, spec)

    def output_gradient(self, o: Tensor) -> Tensor:
        return torch.randn_like(o)

    def parts(self) -> Iterable[CheckedPart]:
        """The last sequence, where a wrong offset would show, and the longest."""
        lengths = [end - start for start, end in itertools.pairwise(self._starts)]
        for index in {len(lengths) - 1, lengths.index(max(lengths))}:
            length = lengths[index]
            part = replace(self.problem, batch_size=1, q_len=length, kv_len=length, packed=False)
            take = partial(_one_sequence, start=self._starts[index], length=length)
            yield CheckedPart(problem=part, take=take)


def _one_sequence(x_THD: Tensor, *, start: int, length: int) -> Tensor:
    """One sequence of a packed tensor as a batch of one, [1, H, S, D]."""
    return x_THD[start : start + length].transpose(0, 1).unsqueeze(0)


def self_attention_packing(lengths: Sequence[int], device: torch.device) -> Packing:
    """The packing of sequences of these lengths, with as many queries as keys."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return Packing(cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest)
