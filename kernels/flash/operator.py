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
    """o [B, H, S, D_v] and lse [B, H, S] float32; packed, [T, H, D_v] and [H, T].

    Args:
        accumulator: float32 (o, lse) of other keys to continue from. The result, float32 too,
            is written there where its layout allows.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or no implementation can run here.
    """
    if torch.compiler.is_compiling():
        o, lse, _ = flash_forward(*_flat(call), *(accumulator or (None, None)), *_flat_mask(call))
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
        dq, dk, dv = flash_backward(*_flat(call), do, o, lse, dlse, None, *_flat_mask(call))
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

_MASK = "SymInt? window=None, SymInt prefix_len=0, SymInt shift=0, float? softcap=None"
"""The rest of a call, last and with defaults, for graphs that PyTorch's caches kept from before."""

_NO_MASK = (None, 0, 0, None)


def _halves(arguments: tuple[Any, ...], num_others: int) -> tuple[FlashCall, tuple[Any, ...]]:
    """The call, and the arguments between its two parts; PyTorch leaves out trailing defaults."""
    given = (*arguments, None) if len(arguments) < _NUM_FLAT + num_others else arguments
    others, mask = given[_NUM_FLAT : _NUM_FLAT + num_others], given[_NUM_FLAT + num_others :]
    return _call_of(given[:_NUM_FLAT], (*mask, *_NO_MASK[len(mask) :])), others


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


def _flat_mask(call: FlashCall) -> tuple[Any, ...]:
    """The arguments of ``_MASK``."""
    spec = call.spec
    return spec.window, spec.prefix_len, spec.shift, spec.softcap


def _call_of(flat: tuple[Any, ...], mask: tuple[Any, ...]) -> FlashCall:
    """The inverse of :func:`_flat` and :func:`_flat_mask`."""
    q, k, v, causal, scale, cu_q, cu_k, max_q, max_k, precision, implementation, autotune = flat
    packing = None
    if cu_q is not None and cu_k is not None:
        packing = Packing(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_q_len=max_q, max_kv_len=max_k)
    options = FlashOptions(precision=precision, implementation=implementation, autotune=autotune)
    window, prefix_len, shift, softcap = mask
    spec = AttentionSpec(
        causal=causal,
        scale=scale,
        packing=packing,
        window=window,
        prefix_len=prefix_len,
        shift=shift,
        softcap=softcap,
    )
    return FlashCall(q=q, k=k, v=v, spec=spec, options=options)


@torch.library.custom_op(
    "attnbench::flash_forward",
    mutates_args=(),
    schema=f"({_CALL}, Tensor? earlier_o, Tensor? earlier_lse, {_MASK}) "
    "-> (Tensor, Tensor, Tensor)",
)
def flash_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`forward` as torch.compile sees it, and the rest of lse: it changes no argument."""
    call, (earlier_o, earlier_lse) = _halves(arguments, 2)
    if earlier_o is None:
        return _run_with_rest(call)
    o, lse = run_forward(call, (earlier_o.clone(), earlier_lse.clone()))
    return o, lse, lse.new_empty(0)


@torch.library.custom_op(
    "attnbench::flash_backward",
    mutates_args=(),
    # rest has a default as _MASK has.
    schema=f"({_CALL}, Tensor do, Tensor o, Tensor lse, Tensor? dlse, Tensor? rest=None, {_MASK}) "
    "-> (Tensor, Tensor, Tensor)",
)
def flash_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`backward` as torch.compile sees it."""
    call, others = _halves(arguments, 5)
    return run_backward(call, *others)


@flash_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, (earlier_o, earlier_lse) = _halves(arguments, 2)
    if earlier_o is not None:
        o, lse = torch.empty_like(earlier_o), torch.empty_like(earlier_lse)
        return o, lse, lse.new_empty(0)
    packed = call.spec.packing is not None
    o, lse = empty_results(call.q, call.v, packed)
    rest = empty_rest(call.q, packed)
    return o, lse, lse.new_empty(0) if rest is None else rest


@flash_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, causal, scale, cu_q, cu_k, *others = inputs[:_NUM_FLAT]
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.numbers, ctx.others, ctx.mask = (causal, scale), others, inputs[_NUM_FLAT + 2 :]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    q, k, v, o, lse, rest, cu_q, cu_k = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    call = (q, k, v, *ctx.numbers, cu_q, cu_k, *ctx.others)
    rest = rest if rest.numel() else None
    gradients = flash_backward(*call, do, o, lse, dlse, rest, *ctx.mask)
    return *gradients, *(None,) * (_NUM_FLAT - 3 + 2 + len(_NO_MASK))


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "attnbench::flash_forward: second derivatives are not available; attention=naive has them"
    )


flash_forward.register_autograd(_differentiate, setup_context=_keep)
flash_backward.register_autograd(_refuse)
