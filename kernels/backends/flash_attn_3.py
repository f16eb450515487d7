"""FlashAttention-3, the CUDA library for Hopper of its authors (Shah et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernels.backend import attention_backend
from kernels.decoding import DecodeProblem
from kernels.libraries.adapter import call_by_name, capability, why_not_head_dim
from kernels.libraries.flash_attention import FlashLibrary, lengths_of, mask_of
from kernels.problem import AttentionProblem, AttentionSpec
from kernels.registry import Look

_SHARED = ("q", "k", "v", "softmax_scale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q")


@attention_backend("flash_attn_3", look=Look(colour="#882255", marker="*"))
@dataclass(kw_only=True, slots=True)
class FlashAttn3(FlashLibrary):
    """Built from the folder ``hopper`` of flash-attention's repository."""

    modules: ClassVar[tuple[str, ...]] = (
        "flash_attn_3.flash_attn_interface",
        "flashattn_hopper.flash_attn_interface",
        "flash_attn_interface",
    )
    distribution: ClassVar[str] = "flash-attn-3"
    install: ClassVar[str] = (
        "build hopper/ of github.com/Dao-AILab/flash-attention (python setup.py install)"
    )
    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "_flash_attn_forward": (*_SHARED, "causal"),
        "_flash_attn_backward": (*_SHARED, "softmax_lse", "dq", "dk", "dv"),
    }

    def why_not_here(self, problem: AttentionProblem) -> str | None:
        major, minor = capability()
        if major != 9:
            return f"needs compute capability 9.0 (Hopper), this device has {major}.{minor}"
        if self.deterministic and problem.needs_grad and problem.head_dim > 192:
            # Refused by mha_bwd in hopper/flash_api.cpp.
            return f"deterministic gradients need a head_dim of at most 192, not {problem.head_dim}"
        return why_not_head_dim(problem.head_dim, 256)

    def why_not_decode_here(self, problem: DecodeProblem) -> str | None:
        major, minor = capability()
        if major != 9:
            return f"needs compute capability 9.0 (Hopper), this device has {major}.{minor}"
        return None

    def library_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module: Any = self.load()
        o, lse, *_ = call_by_name(
            module._flash_attn_forward,
            q=q,
            k=k,
            v=v,
            softmax_scale=spec.scale,
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
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        call_by_name(
            module._flash_attn_backward,
            dout=do,
            q=q,
            k=k,
            v=v,
            out=o,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=spec.scale,
            # Earlier versions name it causal, as mask_of does.
            is_causal=spec.causal and not spec.shift,
            deterministic=self.deterministic,
            **mask_of(spec),
            **lengths_of(spec.packing),
        )
        return dq, dk, dv
