"""The entry points every flash implementation goes through: check, choose, run.

``forward`` and ``backward`` take tensors as :mod:`kernels.backend` describes them, dense or
packed; :mod:`kernels.flash.dispatch` runs them. Both are also operators of PyTorch,
``attnbench::flash_forward`` and ``flash_backward``, with fake implementations and an autograd
formula, so that torch.compile has no graph break at them. Outside of torch.compile the
functions run directly, since a dispatch through Python costs a short sequence more than its
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.flash.dispatch import empty_like, empty_results, run_backward, run_forward
from kernels.problem import Packing


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    packing: Packing | None = None,
    accumulator: tuple[Tensor, Tensor] | None = None,
    precision: str = "ieee",
    implementation: str = "auto",
    autotune: bool = False,
) -> tuple[Tensor, Tensor]:
    """q [B, H, S, D], k and v [B, H_kv, S_k, D] -> o [B, H, S, D] and lse [B, H, S] float32.

    Args:
        packing: q is then [T, H, D], k and v [T_k, H_kv, D], and lse [H, T].
        accumulator: float32 (o, lse) of other keys to continue from. The result, float32 too,
            is written there where its layout allows.
        precision: of float32 matmuls: ``ieee``, ``tf32``, or ``auto`` to follow
            torch.get_float32_matmul_precision().
        implementation: a name of ``dispatch.IMPLEMENTATIONS``, or ``auto`` for the first that can.
        autotune: search for tile sizes if none are known for these shapes.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or no implementation can run here.
    """
    run: Callable[..., Any] = flash_forward if torch.compiler.is_compiling() else run_forward
    return run(
        q,
        k,
        v,
        causal,
        scale,
        *_unpacked(packing),
        *((None, None) if accumulator is None else accumulator),
        precision,
        implementation,
        autotune,
    )


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    packing: Packing | None = None,
    dlse: Tensor | None = None,
    precision: str = "ieee",
    implementation: str = "auto",
    autotune: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv), in the shapes and dtype of q, k and v; bit for bit repeatable.

    Args:
        o: in the dtype of q or float32; with ``lse`` it may be of more keys than these.
        dlse: the gradient that reaches lse, shaped like it.
    """
    run: Callable[..., Any] = flash_backward if torch.compiler.is_compiling() else run_backward
    return run(
        do,
        q,
        k,
        v,
        o,
        lse,
        causal,
        scale,
        *_unpacked(packing),
        dlse,
        precision,
        implementation,
        autotune,
    )


def _unpacked(packing: Packing | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    if packing is None:
        return None, None, 0, 0
    return packing.cu_seqlens_q, packing.cu_seqlens_k, packing.max_q_len, packing.max_kv_len


_OPTIONS = "str precision, str implementation, bool autotune"
_PACKING = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q_len, SymInt max_kv_len"


@torch.library.custom_op(
    "attnbench::flash_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, bool causal, float scale, {_PACKING}, "
    f"Tensor? earlier_o, Tensor? earlier_lse, {_OPTIONS}) -> (Tensor, Tensor)",
)
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    earlier_o: Tensor | None,
    earlier_lse: Tensor | None,
    precision: str,
    implementation: str,
    autotune: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`forward` as torch.compile sees it: it changes none of its arguments."""
    if earlier_o is not None and earlier_lse is not None:
        earlier_o, earlier_lse = earlier_o.clone(), earlier_lse.clone()
    return run_forward(
        q, k, v, causal, scale, cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len,
        earlier_o, earlier_lse, precision, implementation, autotune,
    )  # fmt: skip


@torch.library.custom_op(
    "attnbench::flash_backward",
    mutates_args=(),
    schema="(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, "
    f"float scale, {_PACKING}, Tensor? dlse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    dlse: Tensor | None,
    precision: str,
    implementation: str,
    autotune: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`backward` as torch.compile sees it."""
    return run_backward(
        do, q, k, v, o, lse, causal, scale, cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len,
        dlse, precision, implementation, autotune,
    )  # fmt: skip


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, *rest: Any) -> Any:
    cu_seqlens_q, earlier_o, earlier_lse = rest[0], rest[4], rest[5]
    if earlier_o is not None:
        return torch.empty_like(earlier_o), torch.empty_like(earlier_lse)
    return empty_results(q, cu_seqlens_q is not None)


@flash_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return empty_like(q), empty_like(k), empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, cu_q, cu_k, max_q, max_k, *_, precision, name, tune = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.max_lengths, ctx.options = (max_q, max_k), (precision, name, tune)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse, cu_q, cu_k = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    gradients = flash_backward(
        do, q, k, v, o, lse, ctx.causal, ctx.scale, cu_q, cu_k, *ctx.max_lengths, dlse, *ctx.options
    )
    return *gradients, *(None,) * 11


flash_forward.register_autograd(_differentiate, setup_context=_keep)
