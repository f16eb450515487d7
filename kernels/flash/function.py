"""Differentiable flash attention: a function for users, and the CS336 text's autograd.Function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels import sinks as sink_logits
from kernels.autograd import first_order_only
from kernels.flash import dispatch, native, operator
from kernels.flash.call.arguments import DEFAULT_OPTIONS, FlashCall, FlashOptions
from kernels.problem import AttentionSpec, Packing

AUTOGRAD = ("auto", "native", "python")


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    prefix_len: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    packing: Packing | None = None,
    return_lse: bool = False,
    options: FlashOptions = DEFAULT_OPTIONS,
) -> Any:
    """o = softmax(q k^T * scale) v, by tiles; gradients reach all inputs through o and through lse.

    Args:
        q: [B, H, S, D], or with ``packing`` [T, H, D]; float32, float16 or bfloat16, and under
            torch.autocast cast to its dtype, as PyTorch's attention does.
        k, v: [B, H_kv, S_k, D] or [T_k, H_kv, D]; H_kv divides H. v may have fewer columns, which
            o has then.
        causal: query i sees keys 0 .. i + S_k - S.
        window: keys as far as this from query i's own position i + S_k - S, or farther, are
            hidden: with ``causal`` it sees its own key and window - 1 before.
        prefix_len: with ``causal``, and without a window, every query sees so many first keys.
        softcap: scores s become softcap tanh(s / softcap), after the scale.
        sinks: [H], a logit for each head that takes part in the softmax and has no value; lse is
            then over the keys and the sink.
        scale: 1/sqrt(D) if not given.
        return_lse: give (o, lse) with lse float32 [B, H, S] or [H, T], natural logarithm.

    Returns:
        o, or (o, lse). A query that sees no key has output zero, and lse minus infinity but for
        its sink. In a packed batch masks are those of each sequence.

    Raises:
        ValueError: the call makes no sense, cannot run here, or not with native gradients.
        RuntimeError: in a second derivative; ``attention=naive`` has them.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    is_plain = window is None and softcap is None and sinks is None and not prefix_len
    if is_plain and packing is None and not return_lse:
        o = _by_node(q, k, v, causal, scale, options)
        if o is not None:
            return o
    spec = AttentionSpec(
        causal=causal,
        scale=scale,
        packing=packing,
        window=window,
        prefix_len=prefix_len,
        softcap=softcap,
        sinks=sinks,
    )
    return _attend(q, k, v, spec, options, return_lse)


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, options: FlashOptions = DEFAULT_OPTIONS
) -> Any:
    """:func:`flash_attention` of a spec, which may have a shift too."""
    if _has_native_form(spec):
        o = _by_node(q, k, v, spec.causal, spec.scale, options)
        if o is not None:
            return o
    return _attend(q, k, v, spec, options, return_lse=False)


def _by_node(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, options: FlashOptions
) -> Tensor | None:
    """o by the compiled node; None if Python has to run this call, as it does the first of a kind.

    Asked before anything is put together for Python, which takes longer than a short sequence.
    """
    if torch.compiler.is_compiling() or not native.is_built():
        return None
    if options.autograd not in ("auto", "native"):
        return None
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )  # fmt: skip
    return native.attend(q, k, v, causal, scale, options) if needs_grad else None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    options: FlashOptions,
    return_lse: bool,
) -> Any:
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if options.autograd not in AUTOGRAD:
        raise ValueError(f"autograd is {options.autograd}: must be one of {', '.join(AUTOGRAD)}")
    if spec.sinks is not None:
        _check_sinks(spec.sinks, q)
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (spec.sinks is not None and spec.sinks.requires_grad)
    )
    if needs_grad and not torch.compiler.is_compiling():
        return _Attention.apply(q, k, v, spec.sinks, spec, options, return_lse)
    # Under torch.compile the operator brings its own derivative.
    call = FlashCall(q=q, k=k, v=v, spec=spec, options=options)
    o, lse = operator.forward(call)
    if spec.sinks is not None:
        o, lse = sink_logits.add(o, lse, spec.sinks)
    return (o, lse) if return_lse else o


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    num_heads = q.shape[1] if q.dim() > 1 else 0
    if not isinstance(sinks, Tensor):
        raise ValueError(f"sinks is {type(sinks).__name__}: must be a tensor [{num_heads}]")
    if not sinks.is_floating_point():
        raise ValueError(f"sinks is {sinks.dtype}: must be of floating-point numbers")
    if sinks.shape != (num_heads,) or sinks.device != q.device:
        raise ValueError(
            f"sinks is {list(sinks.shape)} on {sinks.device}: must be [{num_heads}] on {q.device}"
        )


def _has_native_form(spec: AttentionSpec) -> bool:
    """Whether the compiled node can have learned such calls: dense, with a plain mask or none."""
    return (
        spec.packing is None
        and spec.window is None
        and spec.softcap is None
        and spec.sinks is None
        and not spec.prefix_len
        and not spec.shift
    )


class _Attention(torch.autograd.Function):
    """o, or (o, lse), both differentiable; saves q, k, v, o, lse, and of float32 its rest."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        spec: AttentionSpec,
        options: FlashOptions,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        call = FlashCall(q=q, k=k, v=v, spec=spec, options=options)
        problem = call.problem()
        has_node = _has_native_form(spec) and problem.value_dim is None and not return_lse
        is_required = options.autograd == "native" and has_node
        if is_required and (reason := native.why_not()) is not None:
            raise ValueError(f"flash attention: autograd=native: {reason}")
        rest = dispatch.empty_rest(q, spec.packing is not None)
        o, lse = dispatch.forward_of(problem, call, rest=rest)
        if sinks is not None:
            o, lse, rest = _with_sinks(o, lse, rest, sinks)
            # Autograd alone may hold a tensor with a history.
            spec = replace(spec, sinks=None)
        ctx.save_for_backward(q, k, v, o, lse, rest, *(() if sinks is None else (sinks,)))
        ctx.problem, ctx.spec, ctx.options = problem, spec, options
        ctx.learns = has_node and options.autograd != "python"
        if ctx.learns:
            native.learn_forward(problem, call, o, lse, rest, required=is_required)
        # lse rarely has a gradient; None is cheaper than zeros.
        ctx.set_materialize_grads(False)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:
        q, k, v, o, lse, rest, *others = ctx.saved_tensors
        sinks = others[0] if others else None
        if do is None:
            do = torch.zeros_like(o)
        call = FlashCall(q=q, k=k, v=v, spec=ctx.spec, options=ctx.options)
        # Autograd guarantees that do and dlse have the shapes and dtypes of o and lse.
        gradients = dispatch.backward_of(ctx.problem, call, do, o, lse, dlse, rest)
        if ctx.learns and dlse is None:
            native.learn_backward(ctx.problem, call, do, o, lse, rest, gradients)
        sources = (do, q, k, v) if dlse is None else (do, dlse, q, k, v)
        if sinks is None:
            return *first_order_only("flash_attention", gradients, sources), *(None,) * 4
        dsinks = _sinks_gradient(do, o, lse, dlse, sinks)
        found = first_order_only("flash_attention", (*gradients, dsinks), (*sources, sinks))
        return *found, *(None,) * 3


def _with_sinks(
    o: Tensor, lse: Tensor, rest: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o and lse over the keys and the sinks, and what float32 rounds away of this lse."""
    if rest is None:
        return *sink_logits.add(o, lse, sinks), None
    # As sinks.add does it, in float64: a total of thousands is rounded by more than is left of it.
    of_keys = lse.double() + rest
    exact = torch.logaddexp(of_keys, sinks.double().unsqueeze(-1))
    is_empty = exact == float("-inf")
    weight = (of_keys - exact.masked_fill(is_empty, 0.0)).exp().float()
    o = o * (weight if o.dim() == 4 else weight.transpose(0, 1)).unsqueeze(-1)
    total = exact.float()
    return o, total, (exact - total).masked_fill(is_empty, 0.0).float()


def _sinks_gradient(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None, sinks: Tensor
) -> Tensor:
    """d sinks of o and lse with sinks, through both."""
    dsinks = sink_logits.gradient(do, o, lse, sinks)
    if dlse is None:
        return dsinks
    share = (sinks.float().unsqueeze(-1) - lse.masked_fill(lse == float("-inf"), 0.0)).exp() * dlse
    return dsinks + share.sum(-1 if lse.dim() == 2 else (0, 2)).to(dsinks.dtype)


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 as CS336 assignment 2 asks for it: ``apply(Q, K, V, is_causal)``.

    Q, K, V are [batch, seq, d] or [batch, heads, seq, d], and the scale is 1/sqrt(d); V and O may
    have fewer columns. Besides Q, K, V and O it saves one tensor, the log-sum-exp, of shape
    ``Q.shape[:-1]``; at scores of thousands :func:`flash_attention` has the better float32
    gradients, since it keeps more of it.
    """

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        if Q.dim() not in (3, 4):
            raise ValueError(f"Q has {Q.dim()} dimensions: must be [..., seq, d] with 3 or 4")
        q, k, v = (_with_heads(x) for x in (Q, K, V))
        call = _course_call(q, k, v, is_causal)
        o, lse = operator.forward(call)
        O, L = o.view(*Q.shape[:-1], V.shape[-1]), lse.view(Q.shape[:-1])  # noqa: E741
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> Any:
        Q, K, V, O, L = ctx.saved_tensors  # noqa: E741
        do, q, k, v, o = (_with_heads(x) for x in (dO, Q, K, V, O))
        call = _course_call(q, k, v, ctx.is_causal)
        gradients = operator.backward(call, do, o, L.view(q.shape[:-1]))
        shaped = [dx.view(x.shape) for dx, x in zip(gradients, (Q, K, V), strict=True)]
        return *first_order_only("FlashAttentionTriton", shaped, (dO, Q, K, V)), None


def _course_call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> FlashCall:
    # Options are named, since torch.compile cannot trace a field's default in a Function.
    spec = AttentionSpec(causal=causal, scale=q.shape[-1] ** -0.5, packing=None)
    return FlashCall(q=q, k=k, v=v, spec=spec, options=DEFAULT_OPTIONS)


def _with_heads(x: Tensor) -> Tensor:
    """[..., seq, d] as [batch, heads, seq, d]."""
    return x.unsqueeze(1) if x.dim() == 3 else x
