"""The numeric check that every case passes before it is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from harness.bench import Bench, WrongResult
from harness.case import Case
from kernels._reference import TOLERANCE, check_slice
from kernels.backend import AttentionProblem


def autocast(case: Case) -> contextlib.AbstractContextManager[None]:
    """The case's autocast context; does nothing in a pure precision."""
    if case.precision.autocast is None:
        return contextlib.nullcontext()
    dtype = getattr(torch, case.precision.autocast)
    return torch.autocast(case.device, dtype=dtype)


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


class Call(Protocol):
    """An attention call as a task makes it: its inputs, the call, and how to look at it."""

    problem: AttentionProblem

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v on the device, which require grad if the problem does."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def views(self) -> Iterable[tuple[AttentionProblem, Callable[[Tensor], Tensor]]]:
        """Dense parts to check: the problem of each, and its view of a tensor of the call."""
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

    def views(self) -> Iterable[tuple[AttentionProblem, Callable[[Tensor], Tensor]]]:
        return [(self.problem, lambda x: x)]


def check_attention(case: Case, bench: Bench, *, sequence_major: bool) -> None:
    """Run the case's attention once at full size and compare a slice with float64."""
    check_call(case, bench, DenseCall(case, bench.device, sequence_major=sequence_major))


def check_call(case: Case, bench: Bench, call: Call) -> None:
    """Make a call once at full size and compare slices of its views with float64.

    Raises WrongResult if any relative error exceeds the tolerance of the case's number format.
    """
    bench.stage("checking")
    problem = call.problem
    q, k, v = call.inputs()
    tensors = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
    with autocast(case), torch.set_grad_enabled(problem.needs_grad):
        o = call.attend(q, k, v)
    tensors["o"] = o.detach()
    if problem.needs_grad:
        do = torch.randn_like(o)
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
        tensors |= {"do": do, "dq": dq, "dk": dk, "dv": dv}
    with torch.no_grad():
        found = [
            check_slice(
                part, {name: view(x) for name, x in tensors.items()}, scale=problem.head_dim**-0.5
            )
            for part, view in call.views()
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
