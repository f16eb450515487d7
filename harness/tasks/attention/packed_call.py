"""The attention call over a packed batch: sequences end to end, and where each begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.cases.case import Case
from harness.measure.check import Part
from kernels import Packing


class PackedCall:
    """q [T, H, D] and k, v [T, H_kv, D] through the attention: a `harness.measure.check.Call`.

    Args:
        lengths: tokens of each sequence, as many queries as keys.
    """

    def __init__(self, case: Case, device: torch.device, lengths: Sequence[int]) -> None:
        self.problem = case.attention_problem
        self._case = case
        self._device = device
        self._starts = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(self._starts, dtype=torch.int32, device=device)
        self._packing = Packing(
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_q_len=max(lengths),
            max_kv_len=max(lengths),
        )

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        problem = self.problem
        dtype = getattr(torch, problem.dtype)

        def tensor(heads: int) -> Tensor:
            shape = (self._starts[-1], heads, problem.head_dim)
            x = torch.randn(shape, device=self._device, dtype=dtype)
            return x.requires_grad_(problem.needs_grad)

        return tensor(problem.num_heads), tensor(problem.num_kv_heads), tensor(problem.num_kv_heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        problem = self.problem
        return self._case.attention.attend_packed(
            q, k, v, self._packing, causal=problem.causal, scale=problem.head_dim**-0.5
        )

    def output_gradient(self, o: Tensor) -> Tensor:
        return torch.randn_like(o)

    def parts(self) -> Iterable[Part]:
        """The last sequence, where a wrong offset would show, and the longest."""
        lengths = [end - start for start, end in itertools.pairwise(self._starts)]
        for index in {len(lengths) - 1, lengths.index(max(lengths))}:
            length = lengths[index]
            part = replace(self.problem, batch_size=1, q_len=length, kv_len=length, packed=False)
            take = partial(_one_sequence, start=self._starts[index], length=length)
            yield Part(problem=part, take=take)


def _one_sequence(x_THD: Tensor, *, start: int, length: int) -> Tensor:
    """One sequence of a packed tensor as a batch of one, [1, H, S, D]."""
    return x_THD[start : start + length].transpose(0, 1).unsqueeze(0)
