"""Differentiable flash attention: a function for users, and the CS336 text's autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.flash import dispatch, operator
from kernels.flash.hopper import native
from kernels.flash.problem import describe
from kernels.problem import Packing

AUTOGRAD = ("auto", "native", "python")


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    packing: Packing | None = None,
    return_lse: bool = False,
    precision: str = "auto",
    implementation: str = "auto",
    autotune: bool = False,
    autograd: str = "auto",
) -> Any:
    """o = softmax(q k^T * scale) v, by tiles; gradients reach q, k, v through o and through lse.

    Args:
        q: [B, H, S, D], or with ``packing`` [T, H, D]; float32, float16 or bfloat16, and under
            torch.autocast cast to its dtype, as PyTorch's attention does.
        k, v: [B, H_kv, S_k, D] or [T_k, H_kv, D]; H_kv divides H.
        causal: query i sees keys 0 .. i + S_k - S.
        scale: 1/sqrt(D) if not given.
        return_lse: give (o, lse) with lse float32 [B, H, S] or [H, T], natural logarithm.
        precision, implementation, autotune: see :func:`kernels.flash.operator.forward`.
        autograd: what runs the gradients of the Hopper kernels: the compiled node of
            module ``hopper.native`` (``native``), ``python``, or ``auto``: native where it can be
            built. Packed batches, and calls that return lse, are Python's.

    Returns:
        o, or (o, lse). A query that sees no key has output zero and lse minus infinity.

    Raises:
        ValueError: the call makes no sense, cannot run here, or not with native gradients.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if autograd not in AUTOGRAD:
        raise ValueError(f"autograd is {autograd}: must be one of {', '.join(AUTOGRAD)}")
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )  # fmt: skip
    if needs_grad and not torch.compiler.is_compiling():
        if packing is not None or return_lse:
            autograd = "python"
        if autograd != "python" and implementation != "plain":
            o = native.attend(q, k, v, causal, scale)
            if o is not None:
                return o
        return _Attention.apply(
            *(q, k, v, causal, scale, packing, return_lse, precision, implementation, autotune),
            autograd,
        )  # fmt: skip
    # Under torch.compile the operator brings its own derivative.
    o, lse = operator.forward(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        packing=packing,
        precision=precision,
        implementation=implementation,
        autotune=autotune,
    )
    return (o, lse) if return_lse else o


class _Attention(torch.autograd.Function):
    """o, or (o, lse), both differentiable; saves q, k, v, o and lse."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        packing: Packing | None,
        return_lse: bool,
        precision: str,
        implementation: str,
        autotune: bool,
        autograd: str,
    ) -> Tensor | tuple[Tensor, Tensor]:
        problem = describe(
            q, k, v, causal=causal, packing=packing, precision=precision, autotune=autotune
        )  # fmt: skip
        if autograd == "native":
            reason = "implementation=plain has none" if implementation == "plain" else None
            reason = reason or dispatch.why_not(problem, "hopper")
            if reason is not None:
                raise ValueError(f"flash attention: autograd=native: {reason}")
        o, lse = dispatch.forward_of(
            problem, q, k, v, scale=scale, packing=packing, implementation=implementation
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.problem = problem
        ctx.options = {"scale": scale, "packing": packing, "implementation": implementation}
        ctx.learns = autograd != "python" and implementation != "plain"
        if ctx.learns:
            native.learn_forward(problem, q, k, v, o, lse, required=autograd == "native")
        # lse rarely has a gradient; None is cheaper than zeros.
        ctx.set_materialize_grads(False)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(o)
        # Autograd has seen to it that do and dlse have the shapes and dtypes of o and lse.
        gradients = dispatch.backward_of(ctx.problem, do, q, k, v, o, lse, dlse, **ctx.options)
        if ctx.learns and dlse is None:
            native.learn_backward(ctx.problem, do, q, k, v, o, lse, gradients)
        return *gradients, *(None,) * 8


class FlashTriton(torch.autograd.Function):
    """FlashAttention-2 as CS336 assignment 2 asks for it: ``apply(Q, K, V, is_causal)``.

    Q, K, V are [batch, seq, d] or [batch, heads, seq, d], and the scale is 1/sqrt(d). Besides Q,
    K, V and O it saves one tensor, the log-sum-exp, of shape ``Q.shape[:-1]``.
    """

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        if Q.dim() not in (3, 4):
            raise ValueError(f"Q has {Q.dim()} dimensions: must be [..., seq, d] with 3 or 4")
        q, k, v = (_with_heads(x) for x in (Q, K, V))
        o, lse = operator.forward(
            q, k, v, causal=is_causal, scale=Q.shape[-1] ** -0.5, precision="auto"
        )
        O, L = o.view(Q.shape), lse.view(Q.shape[:-1])  # noqa: E741
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> Any:
        Q, K, V, O, L = ctx.saved_tensors  # noqa: E741
        do, q, k, v, o = (_with_heads(x) for x in (dO, Q, K, V, O))
        gradients = operator.backward(
            do,
            q,
            k,
            v,
            o,
            L.view(q.shape[:-1]),
            causal=ctx.is_causal,
            scale=Q.shape[-1] ** -0.5,
            precision="auto",
        )
        return *(dx.view(x.shape) for dx, x in zip(gradients, (Q, K, V), strict=True)), None


def _with_heads(x: Tensor) -> Tensor:
    """[..., seq, d] as [batch, heads, seq, d]."""
    return x.unsqueeze(1) if x.dim() == 3 else x
