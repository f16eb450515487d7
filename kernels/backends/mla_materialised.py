"""Latent attention with keys and values up-projected for every token, at every step.

The formulas of DeepSeek-V2 as they are defined, the baseline of absorption: the cache is small,
but each step multiplies all of it by W_k and W_v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.backend import Decoding, attention_backend
from kernels.decode.steps import latent
from kernels.decoding import DecodeProblem, operator_workspace
from kernels.registry import Look
from kernels.rotary import Rotary


@attention_backend("mla_materialised", look=Look(colour="#999933", marker="^"))
@dataclass(kw_only=True, slots=True)
class MlaMaterialised(Decoding):
    """PyTorch's operators over up-projected keys and values."""

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        return None if problem.is_latent else "takes latents: use cache=latent"

    def rounds_scores_in_steps(self, problem: DecodeProblem) -> bool:
        return True

    def decode_workspace(self, problem: DecodeProblem) -> float:
        size = 4 if problem.dtype == "float32" else 2
        tokens = problem.batch_size * problem.num_heads * problem.max_len
        return operator_workspace(problem) + 2.0 * size * tokens * problem.head_dim

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> latent.MaterialisedSteps:
        return latent.MaterialisedSteps(problem, cache, rotary=rotary, scale=scale)
