"""Latent attention in the latent space: W_k absorbed into the query, W_v applied afterwards.

q^T (W_k c) = (W_k^T q)^T c, so that all heads attend to the one latent of a token as to a key
and a value (DeepSeek-V2, section 2.1.2); the step reads each latent once, for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.backend import Decoding, attention_backend
from kernels.decode.available import why_not_here
from kernels.decode.steps import absorbed_kernels, latent
from kernels.decoding import (
    DecodeProblem,
    LatentDecoder,
    operator_workspace,
)
from kernels.registry import Look
from kernels.rotary import Rotary

IMPLEMENTATIONS = ("auto", "triton", "torch")


@attention_backend("mla_absorbed", look=Look(colour="#AA4499", marker="v"))
@dataclass(kw_only=True, slots=True)
class MlaAbsorbed(Decoding):
    """This project's Triton kernel where it runs, else PyTorch's operators."""

    implementation: str = "auto"
    """triton (kernels.decode), torch (operators, which gather paged latents), or auto."""

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"attention.implementation={self.implementation}: must be one of "
                f"{', '.join(IMPLEMENTATIONS)}"
            )

    def libraries(self) -> tuple[str, ...]:
        return ("triton",)

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        if not problem.is_latent:
            return "takes latents: use cache=latent"
        return why_not_here(problem) if self.implementation == "triton" else None

    def decode_choice(self, problem: DecodeProblem) -> str:
        """``mla_absorbed(triton)`` or ``(torch)`` with implementation=auto."""
        if self.implementation != "auto":
            return self.name
        return f"{self.name}({'triton' if self._uses_kernel(problem) else 'torch'})"

    def _uses_kernel(self, problem: DecodeProblem) -> bool:
        if self.implementation == "auto" and problem.device == "cpu":
            return False
        return self.implementation != "torch" and why_not_here(problem) is None

    def rounds_scores_in_steps(self, problem: DecodeProblem) -> bool:
        return not self._uses_kernel(problem)

    def decode_workspace(self, problem: DecodeProblem) -> float:
        # Without asking the device: predictions are made where no CUDA context should be.
        kernel = problem.device == "cuda" and self.implementation != "torch"
        return 0.0 if kernel else operator_workspace(problem)

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> LatentDecoder:
        if self._uses_kernel(problem):
            return absorbed_kernels.AbsorbedKernelSteps(cache, rotary=rotary, scale=scale)
        return latent.AbsorbedSteps(problem, cache, rotary=rotary, scale=scale)
