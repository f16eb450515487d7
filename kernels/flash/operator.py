"""The entry points every flash implementation goes through: check, choose, run.

:mod:`kernels.flash.dispatch` runs a call. ``attnbench::flash_forward`` and ``flash_backward`` are
the same as operators of PyTorch, with fake implementations and an autograd formula, so that
torch.compile has no graph break at them. Outside of torch.compile the functions run directly, since
a dispatch through PyTorch costs a short sequence more than its attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.flash.dispatch import (
    empty_like,
    empty_rest,
    empty_results,
    forward_of,
    run_backward,
    run_forward,
)
from kernels.problem import AttentionSpec, Packing


def forward(
    call: FlashCall, accumulator: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, H, S, D] and lse [B, H, S] float32; packed, [T, H, D] and [H, T].

    Args:
        accumulator: float32 (o, lse) of other keys to continue from. The result, float32 too,
            is written there where its layout allows.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or no implementation can run here.
    """
    if torch.compiler.is_compiling():
        o, lse, _ = flash_forward(*_flat(call), *(accumulator or (None, None)))
        return o, lse
    return run_forward(call, accumulator)


def backward(
    call: FlashCall, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv), in the shapes and dtype of q, k and v; bit for bit repeatable.

    Args:
        o: in the dtype of q or float32; with ``lse`` it may be of more keys than these.
        dlse: the gradient that reaches lse, shaped like it.
    """
    if torch.compiler.is_compiling():
        dq, dk, dv = flash_backward(*_flat(call), do, o, lse, dlse)
        return dq, dk, dv
    return run_backward(call, do, o, lse, dlse)


def _run_with_rest(call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse, and what float32 rounds away of lse; without elements unless q is float32."""
    rest = empty_rest(call.q, call.spec.packing is not None)
    o, lse = forward_of(call.problem(), call, rest=rest)
    return o, lse, lse.new_empty(0) if rest is None else rest


_CALL = (
    "Tensor q, Tensor k, Tensor v, bool causal, float scale, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q_len, SymInt max_kv_len, "
    "str precision, str implementation, bool autotune"
)
"""A call as an operator's schema takes it, which knows no structures."""

_NUM_FLAT = 12


def _flat(call: FlashCall) -> tuple[Any, ...]:
    """The arguments of ``_CALL``."""
    spec, packing, options = call.spec, call.spec.packing, call.options
    lengths: tuple[Any, ...] = (None, None, 0, 0)
    if packing is not None:
        lengths = (
            packing.cu_seqlens_q,
            packing.cu_seqlens_k,
            packing.max_q_len,
            packing.max_kv_len,
        )
    return (
        *(call.q, call.k, call.v, spec.causal, spec.scale),
        *lengths,
        *(options.precision, options.implementation, options.autotune),
    )


def _call_of(flat: tuple[Any, ...]) -> FlashCall:
    """The inverse of :func:`_flat`."""
    q, k, v, causal, scale, cu_q, cu_k, max_q, max_k, precision, implementation, autotune = flat
    packing = None
    if cu_q is not None and cu_k is not None:
        packing = Packing(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_q_len=max_q, max_kv_len=max_k)
    options = FlashOptions(precision=precision, implementation=implementation, autotune=autotune)
    spec = AttentionSpec(causal=causal, scale=scale, packing=packing)
    return FlashCall(q=q, k=k, v=v, spec=spec, options=options)


@torch.library.custom_op(
    "attnbench::flash_forward",
    mutates_args=(),
    schema=f"({_CALL}, Tensor? earlier_o, Tensor? earlier_lse) -> (Tensor, Tensor, Tensor)",
)
def flash_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`forward` as torch.compile sees it, and the rest of lse: it changes no argument."""
    earlier_o, earlier_lse = arguments[_NUM_FLAT:]
    call = _call_of(arguments[:_NUM_FLAT])
    if earlier_o is None:
        return _run_with_rest(call)
    o, lse = run_forward(call, (earlier_o.clone(), earlier_lse.clone()))
    return o, lse, lse.new_empty(0)


@torch.library.custom_op(
    "attnbench::flash_backward",
    mutates_args=(),
    # With a default, for graphs that PyTorch's caches kept from when it had no rest.
    schema=f"({_CALL}, Tensor do, Tensor o, Tensor lse, Tensor? dlse, Tensor? rest=None) "
    "-> (Tensor, Tensor, Tensor)",
)
def flash_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`backward` as torch.compile sees it."""
    return run_backward(_call_of(arguments[:_NUM_FLAT]), *arguments[_NUM_FLAT:])


@flash_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    earlier_o, earlier_lse = arguments[_NUM_FLAT:]
    if earlier_o is not None:
        o, lse = torch.empty_like(earlier_o), torch.empty_like(earlier_lse)
        return o, lse, lse.new_empty(0)
    call = _call_of(arguments[:_NUM_FLAT])
    packed = call.spec.packing is not None
    o, lse = empty_results(call.q, packed)
    rest = empty_rest(call.q, packed)
    return o, lse, lse.new_empty(0) if rest is None else rest


@flash_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, causal, scale, cu_q, cu_k, *others = inputs[:_NUM_FLAT]
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.numbers, ctx.others = (causal, scale), others
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    q, k, v, o, lse, rest, cu_q, cu_k = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    call = (q, k, v, *ctx.numbers, cu_q, cu_k, *ctx.others)
    gradients = flash_backward(*call, do, o, lse, dlse, rest if rest.numel() else None)
    return *gradients, *(None,) * 11


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "attnbench::flash_forward: second derivatives are not available; attention=naive has them"
    )


flash_forward.register_autograd(_differentiate, setup_context=_keep)
flash_backward.register_autograd(_refuse)
