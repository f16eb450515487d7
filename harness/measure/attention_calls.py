"""One attention call on one rank: its inputs, the call itself, and its parts for the gate.

The batch is dense, or packed: its sequences end to end, with a list of where each begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from harness.cases.case import Case
from harness.gate.gate import Part
from kernels import Attention, AttentionProblem, AttentionSpec, Packing


class AttentionCall(Protocol):
    """An attention call to check and measure: dense, packed, or split over ranks."""

    problem: AttentionProblem
    sinks: Tensor | None
    """The sinks' logits [H], which require grad if the problem does: learned, like weights, they
    are an argument of the call and not one of its inputs."""

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v on the device, which require grad if the problem does."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def output_gradient(self, o: Tensor) -> Tensor:
        """A random gradient of the output; ``o`` may be q, of which it has the rows."""
        ...

    def attend_with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """o and the log-sum-exp, without gradients; None where the attention hides it."""
        ...

    def other_layout(self) -> AttentionCall | None:
        """The call on tensors that lie in memory in the other order that models use."""
        ...

    def parts(self, tensors: dict[str, Tensor]) -> Iterable[Part]:
        """The dense parts of a call's tensors, for the gate: all of them, and all that is in them.

        Args:
            tensors: q, k, v, o and where given do, dq, dk, dv and lse.
        """
        ...

    def whole_sum(self, x: Tensor) -> Tensor:
        """What is learned gets this gradient, of which ranks may have a part each."""
        ...


def learned(call: AttentionCall) -> tuple[Tensor, ...]:
    """What a call learns beside its inputs, of which backward passes give the gradient."""
    return () if call.sinks is None else (call.sinks,)


def draw_sinks(
    problem: AttentionProblem, device: torch.device, generator: torch.Generator | None = None
) -> Tensor | None:
    """Random sinks [H], of the size of scores and in float32; None for a problem without."""
    if not problem.sinks:
        return None
    logits = torch.randn(problem.num_heads, device=device, generator=generator)
    return logits.requires_grad_(problem.needs_grad)


def spec_of(
    problem: AttentionProblem, sinks: Tensor | None, packing: Packing | None = None
) -> AttentionSpec:
    """The arguments of a problem's call beside its inputs."""
    return AttentionSpec(
        causal=problem.causal,
        scale=problem.head_dim**-0.5,
        packing=packing,
        window=problem.window,
        prefix_len=problem.prefix_len,
        softcap=problem.softcap,
        sinks=sinks,
    )


def part_of(
    tensors: dict[str, Tensor],
    spec: AttentionSpec,
    *,
    rounds_scores: bool,
    sequence: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> Part:
    """Dense tensors of a call with these arguments."""
    return Part(
        tensors=tensors,
        causal=spec.causal,
        scale=spec.scale,
        window=spec.window,
        prefix_len=spec.prefix_len,
        softcap=spec.softcap,
        sinks=None if spec.sinks is None else spec.sinks.detach(),
        sequence=sequence,
        share=share,
        rounds_scores=rounds_scores,
    )


class DenseCall:
    """q [B, H, S, D], k [B, H_kv, S_k, D] and v [B, H_kv, S_k, D_v] through the case's attention.

    Args:
        sequence_major: store the tensors as the transformer does, [B, S, H, D] underneath.
    """

    def __init__(self, case: Case, device: torch.device, *, sequence_major: bool) -> None:
        self.problem = case.attention_problem
        self._case = case
        self._device = device
        self._sequence_major = sequence_major
        self.sinks = draw_sinks(self.problem, device)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        problem = self.problem
        return (
            self._random(problem.num_heads, problem.q_len, problem.head_dim),
            self._random(problem.num_kv_heads, problem.kv_len, problem.head_dim),
            self._random(problem.num_kv_heads, problem.kv_len, problem.v_dim),
        )

    def _random(self, heads: int, seq: int, width: int) -> Tensor:
        problem = self.problem
        order = (seq, heads) if self._sequence_major else (heads, seq)
        shape = (problem.batch_size, *order, width)
        x = torch.randn(shape, device=self._device, dtype=getattr(torch, problem.dtype))
        x = x.transpose(1, 2) if self._sequence_major else x
        return x.requires_grad_(problem.needs_grad)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._case.attention.role(Attention).attend(q, k, v, self._spec)

    def attend_with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        backend = self._case.attention.role(Attention)
        return backend.attend_with_lse(q, k, v, self._spec) if backend.gives_lse else None

    @property
    def _spec(self) -> AttentionSpec:
        return spec_of(self.problem, self.sinks)

    def output_gradient(self, o: Tensor) -> Tensor:
        return torch.randn_like(o[..., : self.problem.v_dim])

    def other_layout(self) -> DenseCall:
        return DenseCall(self._case, self._device, sequence_major=not self._sequence_major)

    def whole_sum(self, x: Tensor) -> Tensor:
        return x

    def parts(self, tensors: dict[str, Tensor]) -> Iterable[Part]:
        return [part_of(tensors, self._spec, rounds_scores=rounds_scores(self._case))]


class PackedCall:
    """q [T, H, D], k [T, H_kv, D] and v [T, H_kv, D_v] through the case's attention.

    Args:
        lengths: tokens of each sequence, as many queries as keys.
    """

    def __init__(self, case: Case, device: torch.device, lengths: Sequence[int]) -> None:
        self.problem = case.attention_problem
        self._case = case
        self._device = device
        self._starts = [0, *itertools.accumulate(lengths)]
        self._packing = self_attention_packing(lengths, device)
        self.sinks = draw_sinks(self.problem, device)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        problem = self.problem
        return (
            self._random(problem.num_heads, problem.head_dim),
            self._random(problem.num_kv_heads, problem.head_dim),
            self._random(problem.num_kv_heads, problem.v_dim),
        )

    def _random(self, heads: int, width: int) -> Tensor:
        problem = self.problem
        shape = (self._starts[-1], heads, width)
        x = torch.randn(shape, device=self._device, dtype=getattr(torch, problem.dtype))
        return x.requires_grad_(problem.needs_grad)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._case.attention.role(Attention).attend(q, k, v, self._spec)

    def attend_with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        backend = self._case.attention.role(Attention)
        return backend.attend_with_lse(q, k, v, self._spec) if backend.gives_lse else None

    @property
    def _spec(self) -> AttentionSpec:
        return spec_of(self.problem, self.sinks, self._packing)

    def output_gradient(self, o: Tensor) -> Tensor:
        return torch.randn_like(o[..., : self.problem.v_dim])

    def other_layout(self) -> None:
        return None

    def whole_sum(self, x: Tensor) -> Tensor:
        return x

    def parts(self, tensors: dict[str, Tensor]) -> Iterable[Part]:
        return sequences_of(
            tensors, self._starts, self._spec, rounds_scores=rounds_scores(self._case)
        )


def sequences_of(
    tensors: dict[str, Tensor],
    starts: Sequence[int],
    spec: AttentionSpec,
    *,
    rounds_scores: bool,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Part]:
    """Every sequence of packed tensors as a dense part, a batch of one."""
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        dense = {
            name: x[None, :, start:end] if name == "lse" else x[start:end].transpose(0, 1)[None]
            for name, x in tensors.items()
        }
        yield part_of(dense, spec, rounds_scores=rounds_scores, sequence=index, share=share)


def rounds_scores(case: Case) -> bool:
    """Whether the case's attention rounds its scores, to which the gate holds it then."""
    return case.attention.role(Attention).rounds_scores(case.attention_problem)


def self_attention_packing(lengths: Sequence[int], device: torch.device) -> Packing:
    """The packing of sequences of these lengths, with as many queries as keys."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return Packing(cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest)
