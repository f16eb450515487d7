"""torch.compile of the explicit softmax: Inductor fuses mask and softmax around the matmuls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from kernels.backend import Attention, attention_backend
from kernels.backends.naive import explicit_softmax_attention
from kernels.problem import AttentionProblem, AttentionSpec
from kernels.registry import Look
from kernels.toolchain import why_not_compile


@attention_backend("compiled", look=Look(colour="#AA4499", marker="s", place=1))
@dataclass(kw_only=True, slots=True)
class Compiled(Attention):
    """The naive backend through torch.compile, each shape compiled afresh."""

    compiles: ClassVar[bool] = True

    def libraries(self) -> tuple[str, ...]:
        return ("triton",)

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.packed:
            return "takes no packed batch of different lengths"
        if problem.causal and problem.kv_len < problem.q_len:
            return "with fewer keys than queries, a causal mask leaves rows without any key"
        return why_not_compile(problem.device)

    def keeps_scores(self, problem: AttentionProblem) -> bool:
        return problem.needs_grad

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        return _compiled_attention()(q, k, v, spec)


@cache
def _compiled_attention() -> Callable[..., torch.Tensor]:
    # Static shapes: past the recompile limit a dynamic or eager version would run instead
    # and be timed as if it were this one; fullgraph turns that into an error.
    return torch.compile(explicit_softmax_attention, dynamic=False, fullgraph=True)
