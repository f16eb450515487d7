"""FlashAttention-4, the authors' library in CuTe DSL for Hopper and Blackwell.

Kernels are compiled when first called for a head_dim, dtype and mask, which takes seconds; the
library caches them. Written against 4.0.0b36 of package flash-attn-4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernels.backend import attention_backend
from kernels.libraries.adapter import call_by_name, capability, why_not_head_dim
from kernels.libraries.flash_attention import FlashLibrary, lengths_of, mask_of
from kernels.problem import AttentionProblem, AttentionSpec
from kernels.registry import Look

_SHARED = ("q", "k", "v", "softmax_scale", "causal", "cu_seqlens_q", "cu_seqlens_k")


@attention_backend("flash_attn_4", look=Look(colour="#CC79A7", marker="h"))
@dataclass(kw_only=True, slots=True)
class FlashAttn4(FlashLibrary):
    """Module flash_attn.cute, which flash-attn 2 contains in an older version too."""

    modules: ClassVar[tuple[str, ...]] = ("flash_attn.cute.interface",)
    distribution: ClassVar[str] = "flash-attn-4"
    install: ClassVar[str] = "pip install flash-attn-4==4.0.0b36"
    takes: ClassVar[frozenset[str]] = FlashLibrary.takes | {"value_dim"}
    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "_flash_attn_fwd": (*_SHARED, "return_lse"),
        "_flash_attn_bwd": (*_SHARED, "out", "dout", "lse"),
    }

    def libraries(self) -> tuple[str, ...]:
        return (self.distribution, "nvidia-cutlass-dsl")

    def why_not_installed(self) -> str | None:
        # Without a version of its own the module is the early one that flash-attn 2 contains.
        if self.version() is None:
            return f"{self.distribution} is not installed: {self.install}"
        return FlashLibrary.why_not_installed(self)

    def why_not_here(self, problem: AttentionProblem) -> str | None:
        """Checks of ``_flash_attn_fwd``, ``_flash_attn_bwd`` and ``_validate_head_dims``."""
        major, minor = capability()
        if major < 8 or (major == 8 and problem.needs_grad):
            return (
                "needs compute capability 9.0 (Hopper), or 8.0 without gradients; "
                f"this device has {major}.{minor}"
            )
        if major == 12 and self.deterministic and problem.needs_grad:
            return "has no deterministic gradients on compute capability 12.0"
        banded_or_capped = not problem.mask.is_plain or problem.softcap is not None
        if major in (8, 12) and banded_or_capped:
            # flash_fwd.py ends there with iterations that mask nothing, and "TODO: local".
            return f"takes no window or softcap on compute capability {major}.{minor}"
        widths = problem.head_dim, problem.v_dim
        if major in (10, 11) and widths in ((256, 256), (192, 128)):
            if problem.softcap is not None and problem.needs_grad:
                return f"has no gradients with a softcap at head_dim {widths[0]} on Blackwell"
            return None
        reason = why_not_head_dim(problem.head_dim, 256 if major == 9 else 128)
        step = 32 if problem.needs_grad else 8
        if reason is None and problem.head_dim % step:
            # 4.0.0b36 on an H200 gives a dq that is 1 off in relative error at head_dim 80, and
            # right ones at 64, 96, 128 and 256: records of head_dim_and_gqa in results/h200.
            return f"gradients need a head_dim that is a multiple of 32, not {problem.head_dim}"
        if reason is None and problem.v_dim % step:
            # Right gradients were seen of 128 columns beside keys of 192 alone.
            return f"takes a value_dim that is a multiple of {step}, not {problem.v_dim}"
        return reason

    def library_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module: Any = self.load()
        o, lse, *_ = call_by_name(
            module._flash_attn_fwd,
            q=q,
            k=k,
            v=v,
            softmax_scale=spec.scale,
            return_lse=True,
            **mask_of(spec),
            **lengths_of(spec.packing),
        )
        return o, lse

    def library_backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module: Any = self.load()
        dq, dk, dv = call_by_name(
            module._flash_attn_bwd,
            q=q,
            k=k,
            v=v,
            out=o,
            dout=do,
            lse=lse,
            softmax_scale=spec.scale,
            deterministic=self.deterministic,
            **mask_of(spec),
            **lengths_of(spec.packing),
        )
        return dq, dk, dv
