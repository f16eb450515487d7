"""PyTorch's FlexAttention with a causal block mask, compiled to one Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from kernels import accounting, recompiling
from kernels.backend import Attention, attention_backend
from kernels.problem import AttentionProblem, AttentionSpec
from kernels.registry import Look
from kernels.toolchain import why_not_compile

MASK_BLOCK = 128
"""Queries and keys of a block of the mask, FlexAttention's default."""

KEPT = 32
"""Kinds of calls, such as shapes, whose compiled functions and masks are kept."""


@attention_backend("flex", look=Look(colour="#009E73", marker="<"))
@dataclass(kw_only=True, slots=True)
class Flex(Attention):
    """torch.nn.attention.flex_attention; blocks that the mask empties are skipped."""

    compiles: ClassVar[bool] = True

    def libraries(self) -> tuple[str, ...]:
        return ("triton",)

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.packed:
            return "takes no packed batch of different lengths"
        if problem.causal and problem.kv_len < problem.q_len:
            return "with fewer keys than queries, a causal mask leaves rows without any key"
        if problem.device == "cpu" and problem.needs_grad:
            return "FlexAttention has no backward pass on a CPU"
        return why_not_compile(problem.device)

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """Bytes of one number a row, rowsum(o * do), in float32."""
        return 4.0 * problem.batch_size * problem.num_heads * problem.q_len

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """As of any kernel, and four int32 tables of the blocks that a causal mask leaves."""
        values = accounting.kernel_peak(
            problem, backward_workspace=self.backward_workspace(problem)
        )
        if problem.causal:
            blocks = -(-problem.q_len // MASK_BLOCK) * -(-problem.kv_len // MASK_BLOCK)
            values["block_mask"] = 4.0 * 4 * blocks
        return values

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        mask = _causal_block_mask(q.shape[-2], k.shape[-2], q.device.type) if spec.causal else None
        o: torch.Tensor = _compiled_attention(q, k, v, mask, spec.scale)
        return o


def _flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float
) -> torch.Tensor:
    # Not a part of what ``import torch`` loads.
    from torch.nn.attention.flex_attention import flex_attention

    grouped = q.shape[1] != k.shape[1]
    o: torch.Tensor = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    return o


_compiled_attention = recompiling.CompiledForEach(_flex_attention, kept=KEPT)


@lru_cache(maxsize=KEPT)
def _causal_block_mask(q_len: int, kv_len: int, device: str) -> Any:
    # Likewise.
    from torch.nn.attention.flex_attention import create_block_mask

    offset = kv_len - q_len

    def visible(
        batch: torch.Tensor, head: torch.Tensor, q_index: torch.Tensor, kv_index: torch.Tensor
    ) -> torch.Tensor:
        return kv_index <= q_index + offset

    return create_block_mask(visible, None, None, q_len, kv_len, device=device)
