"""An attention call whose sequences are split over ranks (context parallelism)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from harness.cases.case import Case
from harness.gate.gate import Part
from harness.measure.attention_calls import (
    draw_sinks,
    part_of,
    rounds_scores,
    self_attention_packing,
    sequences_of,
    spec_of,
)
from kernels import AttentionSpec
from parallel.context.bound import SplitAttention


class SplitCall:
    """An :class:`~harness.measure.attention_calls.AttentionCall` of this rank's part of q, k, v.

    All ranks draw the same whole sequences, and each keeps its part.

    Args:
        lengths: tokens of each sequence of a packed batch; None for a dense one.
        sequence_major: store dense tensors as the transformer does, [B, S, H, D] underneath.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        attention: SplitAttention,
        lengths: Sequence[int] | None = None,
        *,
        sequence_major: bool = False,
    ) -> None:
        self.problem = case.attention_problem
        self._case = case
        self._sequence_major = sequence_major
        self._device = device
        self._attention = attention
        self._lengths = lengths
        self._packing = None if lengths is None else self_attention_packing(lengths, device)
        # A generator of its own: ranks may have drawn different numbers from the global one.
        self._generator = torch.Generator(device).manual_seed(case.seed + 1)
        self.sinks = draw_sinks(self.problem, device, self._generator)

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
            part = layout.shard(whole, rank, dim=2)
            if self._sequence_major:
                part = part.transpose(1, 2).contiguous().transpose(1, 2)
            return part
        return layout.shard_packed(whole, self._lengths, rank)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention.attend(q, k, v, self._spec)

    def attend_with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._attention.attend_with_lse(q, k, v, self._spec)

    @property
    def _spec(self) -> AttentionSpec:
        return spec_of(self.problem, self.sinks, self._packing)

    def other_layout(self) -> SplitCall | None:
        if self._lengths is not None:
            return None
        return SplitCall(
            self._case, self._device, self._attention, sequence_major=not self._sequence_major
        )

    def whole_sum(self, x: Tensor) -> Tensor:
        """Each rank has the gradient of its own queries or heads (a collective)."""
        return torch.stack(self._attention.all_parts(x)).sum(0)

    def parts(self, tensors: dict[str, Tensor]) -> Iterable[Part]:
        """Whole sequences, gathered on all ranks; each compares a share of their heads."""
        whole = {name: self._whole(x, lse=name == "lse") for name, x in tensors.items()}
        spec, share = self._spec, (self._attention.rank, self._attention.layout.num_ranks)
        if self._lengths is None:
            rounds = rounds_scores(self._case)
            return [part_of(whole, spec, rounds_scores=rounds, share=share)]
        starts = [0, *itertools.accumulate(self._lengths)]
        return sequences_of(
            whole, starts, spec, rounds_scores=rounds_scores(self._case), share=share
        )

    def _whole(self, x: Tensor, *, lse: bool) -> Tensor:
        """The tensor over whole sequences, gathered from all ranks (a collective)."""
        parts = self._attention.all_parts(x)
        if lse and self._lengths is not None:
            # [H, T] beside [T, H, D].
            parts = [part.mT.contiguous() for part in parts]
            return self._attention.layout.unshard_packed(parts, self._lengths).mT
        if self._lengths is None:
            return self._attention.layout.unshard(parts, 2, self.problem.q_len)
        return self._attention.layout.unshard_packed(parts, self._lengths)

    @property
    def padding(self) -> int:
        """Padding tokens on all ranks together."""
        layout, problem = self._attention.layout, self.problem
        lengths = self._lengths or [problem.q_len] * problem.batch_size
        return sum(layout.padded(length) - length for length in lengths)
