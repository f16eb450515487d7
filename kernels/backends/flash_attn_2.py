"""FlashAttention-2, the CUDA library ``flash_attn`` of its authors (Dao, 2023)."""

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

_PLAIN = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
}
"""Features where they are not used; some versions have no defaults for them."""

PAGE_MULTIPLE = 256
"""Tokens in a block of a paged cache are a multiple of this."""

_SHARED = ("q", "k", "v", "softmax_scale", "causal", "window_size_left")
_VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@attention_backend("flash_attn_2", look=Look(colour="#332288", marker="p"))
@dataclass(kw_only=True, slots=True)
class FlashAttn2(FlashLibrary):
    """Package flash-attn, 2.7 or later; a packed batch's log-sum-exp is [heads, tokens] there."""

    modules: ClassVar[tuple[str, ...]] = ("flash_attn.flash_attn_interface",)
    distribution: ClassVar[str] = "flash-attn"
    install: ClassVar[str] = "pip install flash-attn --no-build-isolation"
    oldest: ClassVar[tuple[int, ...]] = (2, 7)
    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "_flash_attn_forward": _SHARED,
        "_flash_attn_backward": (*_SHARED, "softmax_lse", "dq", "dk", "dv"),
        "_flash_attn_varlen_forward": (*_SHARED, *_VARLEN),
        "_flash_attn_varlen_backward": (*_SHARED, *_VARLEN, "softmax_lse", "dq", "dk", "dv"),
    }

    def why_not_here(self, problem: AttentionProblem) -> str | None:
        major, minor = capability()
        if major < 8:
            return f"needs compute capability 8.0 (Ampere), this device has {major}.{minor}"
        _, right = problem.mask.sides
        if right is not None and problem.kv_len <= right < problem.q_len - 1:
            # mha_fwd in csrc/flash_attn/flash_api.cpp takes a right side of at least kv_len keys
            # for an unlimited one, and the first query stands q_len - 1 keys before the last.
            return "takes a window that reaches further right than the keys are long for none"
        return why_not_head_dim(problem.head_dim, 256)

    def why_not_decode_here(self, problem: DecodeProblem) -> str | None:
        if problem.block_size is not None and problem.block_size % PAGE_MULTIPLE:
            return (
                f"takes blocks of a multiple of {PAGE_MULTIPLE} tokens, not "
                f"cache.block_size={problem.block_size}"
            )
        major, minor = capability()
        if major < 8:
            return f"needs compute capability 8.0 (Ampere), this device has {major}.{minor}"
        return None

    def library_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module: Any = self.load()
        packed = spec.packing is not None
        function = module._flash_attn_varlen_forward if packed else module._flash_attn_forward
        lengths = lengths_of(spec.packing)
        o, lse, *_ = call_by_name(
            function,
            q=q,
            k=k,
            v=v,
            softmax_scale=spec.scale,
            **(_PLAIN | mask_of(spec)),
            **lengths,
        )
        if _may_lack_keys(q, k, spec):
            lse = lse.masked_fill(lse == float("inf"), float("-inf"))
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
        if _may_lack_keys(q, k, spec):
            lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        module: Any = self.load()
        function = (
            module._flash_attn_varlen_backward if spec.packing else module._flash_attn_backward
        )
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        call_by_name(
            function,
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
            deterministic=self.deterministic,
            **(_PLAIN | mask_of(spec)),
            **lengths_of(spec.packing),
        )
        return dq, dk, dv


def _may_lack_keys(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec) -> bool:
    """Whether a query may see no key, whose lse is then plus infinity in this library."""
    return spec.packing is not None or spec.mask.leaves_empty_rows(q.shape[1], k.shape[1])
