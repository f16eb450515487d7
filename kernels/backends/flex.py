"""PyTorch's FlexAttention, compiled to one Triton kernel.

A block mask says which keys are visible, a function of scores caps them, and sinks are put in by
the log-sum-exp, through which FlexAttention can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from kernels import accounting, recompiling, sinks
from kernels.backend import Attention, attention_backend
from kernels.problem import MASKS, AttentionProblem, AttentionSpec, Mask
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
    takes: ClassVar[frozenset[str]] = frozenset((*MASKS, "shift", "value_dim"))

    def takes_here(self, problem: AttentionProblem) -> frozenset[str]:
        # FlexAttention's kernel for CPUs gives no log-sum-exp.
        return self.takes - {"sinks"} if problem.device == "cpu" else self.takes

    def libraries(self) -> tuple[str, ...]:
        return ("triton",)

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.packed:
            return "takes no packed batch of different lengths"
        if problem.causal and problem.kv_len < problem.q_len:
            return "with fewer keys than queries, a causal mask leaves rows without any key"
        if problem.mask.leaves_empty_rows(problem.q_len, problem.kv_len):
            return "this mask leaves rows without any key"
        if problem.device == "cpu" and problem.needs_grad:
            return "FlexAttention has no backward pass on a CPU"
        return why_not_compile(problem.device)

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """Bytes of one number a row, rowsum(o * do), in float32."""
        return 4.0 * problem.batch_size * problem.num_heads * problem.q_len

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """As of any kernel, and four int32 tables of the blocks that a mask leaves.

        With sinks it is not predicted: autograd keeps what it needs of o with and without them.
        """
        if problem.sinks:
            return None
        workspace = self.backward_workspace(problem) if problem.needs_grad else 0.0
        values = accounting.kernel_peak(problem, workspace=workspace)
        if problem.causal or problem.window is not None:
            blocks = -(-problem.q_len // MASK_BLOCK) * -(-problem.kv_len // MASK_BLOCK)
            values["block_mask"] = 4.0 * 4 * blocks
        return values

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        mask = _block_mask(spec.mask, q.shape[-2], k.shape[-2], q.device.type)
        o: torch.Tensor = _compiled_attention(q, k, v, spec.sinks, mask, spec.scale, spec.softcap)
        return o


def _flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink_logits: torch.Tensor | None,
    mask: Any,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    # Not a part of what ``import torch`` loads.
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    given: dict[str, Any] = {
        "score_mod": None if softcap is None else _capping(softcap),
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    o: torch.Tensor
    if sink_logits is None:
        o = flex_attention(q, k, v, **given)
        return o
    o, aux = flex_attention(q, k, v, **given, return_aux=AuxRequest(lse=True))
    return sinks.add(o, aux.lse, sink_logits)[0]


_compiled_attention = recompiling.CompiledForEach(_flex_attention, kept=KEPT)


def _capping(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@lru_cache(maxsize=KEPT)
def _block_mask(mask: Mask, q_len: int, kv_len: int, device: str) -> Any:
    """The mask by blocks, or None for one that shows every query all keys."""
    if not mask.causal and mask.window is None:
        return None
    # Not a part of what ``import torch`` loads.
    from torch.nn.attention.flex_attention import create_block_mask

    offset, window, prefix_len = kv_len - q_len + mask.shift, mask.window, mask.prefix_len

    def visible(
        batch: torch.Tensor, head: torch.Tensor, q_index: torch.Tensor, kv_index: torch.Tensor
    ) -> torch.Tensor:
        position = q_index + offset
        if mask.causal:
            seen = kv_index <= position
            if prefix_len:
                seen = seen | (kv_index < prefix_len)
        else:
            seen = kv_index - position < window
        return seen if window is None else seen & (position - kv_index < window)

    return create_block_mask(visible, None, None, q_len, kv_len, device=device)
