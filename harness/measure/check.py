"""The numeric check that every case passes before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.bench.bench import Bench, WrongResult
from harness.cases.case import Case
from harness.measure.passes import Passes
from kernels.backend import AttentionProblem
from kernels.reference import TOLERANCE, check_slice


def random_qkv(
    problem: AttentionProblem, device: torch.device, *, sequence_major: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal q [B, H, S, D] and k, v [B, H_kv, S_k, D] that require grad if the problem does.

    ``sequence_major`` stores them as the transformer does, [B, S, H, D] underneath.
    """

    def tensor(heads: int, seq: int) -> torch.Tensor:
        order = (seq, heads) if sequence_major else (heads, seq)
        shape = (problem.batch_size, *order, problem.head_dim)
        x = torch.randn(shape, device=device, dtype=getattr(torch, problem.dtype))
        x = x.transpose(1, 2) if sequence_major else x
        return x.requires_grad_(problem.needs_grad)

    return (
        tensor(problem.num_heads, problem.q_len),
        tensor(problem.num_kv_heads, problem.kv_len),
        tensor(problem.num_kv_heads, problem.kv_len),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Part:
    """A dense part of a call, small enough to compare with float64 in places."""

    problem: AttentionProblem
    take: Callable[[Tensor], Tensor]
    """The part of a tensor of the call, [B, H, S, D]."""
    rows: Sequence[slice] | None = None
    """Which rows of o and dq to compare; None is the first and the last."""
    keys: Sequence[slice] | None = None
    """Which rows of dk and dv to compare; None is the last."""


class Call(Protocol):
    """An attention call as a task makes it: its inputs, the call, and how to look at it."""

    problem: AttentionProblem

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v on the device, which require grad if the problem does."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def output_gradient(self, o: Tensor) -> Tensor:
        """A random gradient of the output."""
        ...

    def parts(self) -> Iterable[Part]:
        """What to check."""
        ...


class DenseCall:
    """q [B, H, S, D] and k, v [B, H_kv, S_k, D] through the case's attention."""

    def __init__(self, case: Case, device: torch.device, *, sequence_major: bool) -> None:
        self.problem = case.attention_problem
        self._case = case
        self._device = device
        self._sequence_major = sequence_major

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return random_qkv(self.problem, self._device, sequence_major=self._sequence_major)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        problem = self.problem
        scale = problem.head_dim**-0.5
        return self._case.attention.attend(q, k, v, causal=problem.causal, scale=scale)

    def output_gradient(self, o: Tensor) -> Tensor:
        return torch.randn_like(o)

    def parts(self) -> Iterable[Part]:
        return [Part(problem=self.problem, take=lambda x: x)]


def check_call(case: Case, bench: Bench, call: Call, passes: type[Passes] = Passes) -> None:
    """Make a call at full size and compare slices of its parts with float64.

    The call is made twice, each time on tensors of its own, and its second result is compared:
    from the second time on kernels may be launched in another way, and that is what is timed.
    A case that takes turns with others is checked in its first turn.

    Raises WrongResult if any relative error exceeds the tolerance of the case's number format.
    """
    if not bench.in_first_round:
        return
    bench.stage("checking")
    problem = call.problem
    first_inputs = call.inputs()
    _results_of(passes(case, call, first_inputs), call, first_inputs)
    inputs = call.inputs()
    tensors = _results_of(passes(case, call, inputs), call, inputs)
    del first_inputs  # held until here, so that the second call's lie elsewhere
    with torch.no_grad():
        found = [
            check_slice(
                part.problem,
                {name: part.take(x) for name, x in tensors.items()},
                scale=problem.head_dim**-0.5,
                rows=part.rows,
                keys=part.keys,
            )
            for part in call.parts()
        ]
    errors = {name: max(part[name] for part in found) for name in found[0]}
    number_format = case.precision.peak
    tolerance = TOLERANCE[number_format]
    bench.outcome.check = {"errors": errors, "tolerance": tolerance}
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= tolerance:
        raise WrongResult(
            f"relative error of {worst} against float64 is {errors[worst]:.2g}; "
            f"{number_format} should stay under {tolerance:.2g}"
        )


def _results_of(
    passes: Passes, call: Call, inputs: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Tensor]:
    """q, k, v and what the call makes of them: o and, if the problem needs them, do, dq, dk, dv."""
    tensors = {name: x.detach() for name, x in zip("qkv", inputs, strict=True)}
    o = passes.forward()
    tensors["o"] = o.detach()
    if call.problem.needs_grad:
        do = call.output_gradient(o)
        dq, dk, dv = passes.backward(o, do)
        tensors |= {"do": do, "dq": dq, "dk": dk, "dv": dv}
    return tensors
