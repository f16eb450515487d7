"""Decoding as separate operations: what a fused kernel is compared with.

Rotary on q, rotary on k, the cache's update, scores, softmax and values each launch kernels of
their own, as the standard path of inference does. A paged cache is gathered first, since
PyTorch's matmul knows no block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.backend import Decoding, attention_backend
from kernels.decode.steps import operators
from kernels.decoding import DecodeProblem, operator_workspace
from kernels.registry import Look
from kernels.rotary import Rotary


@attention_backend("standard", look=Look(colour="#000000", marker="o"))
@dataclass(kw_only=True, slots=True)
class Standard(Decoding):
    """PyTorch's operators, one after another."""

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        return "takes keys and values, not latents" if problem.is_latent else None

    def rounds_scores_in_steps(self, problem: DecodeProblem) -> bool:
        return True

    def decode_workspace(self, problem: DecodeProblem) -> float:
        return operator_workspace(problem)

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> operators.MatmulDecoder:
        return operators.MatmulDecoder(problem, cache, rotary=rotary, scale=scale)
