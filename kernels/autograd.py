"""Makes any backend with an explicit forward and backward differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.backend import AttentionBackend, Packing


class AttentionFunction(torch.autograd.Function):
    """o = backend(q, k, v); saves q, k, v, o and the lse, never the score matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        backend: AttentionBackend,
        causal: bool,
        scale: float,
    ) -> Tensor:
        o, lse = backend.forward(q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.backend, ctx.causal, ctx.scale = backend, causal, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = ctx.backend.backward(do, q, k, v, o, lse, causal=ctx.causal, scale=ctx.scale)
        return dq, dk, dv, None, None, None


class PackedAttentionFunction(torch.autograd.Function):
    """o = backend(q, k, v) over a packed batch."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packing: Packing,
        backend: AttentionBackend,
        causal: bool,
        scale: float,
    ) -> Tensor:
        o, lse = backend.forward_packed(q, k, v, packing, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.packing, ctx.backend, ctx.causal, ctx.scale = packing, backend, causal, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = ctx.backend.backward_packed(
            do, q, k, v, o, lse, ctx.packing, causal=ctx.causal, scale=ctx.scale
        )
        return dq, dk, dv, None, None, None, None
