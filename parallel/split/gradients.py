"""Gradients of split attention: none from padding, and none of second order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def guarded(o: Tensor, real: Tensor | None, name: str) -> Tensor:
    """``o``, with gradients that padding cannot leak into and that end with the first order.

    Args:
        o: the attention's result, in a form that ``real`` can be broadcast to.
        real: true for the rows of real tokens; None where there is no padding. What reaches the
            others, from a loss that forgot to leave them out, is dropped.
        name: what was called, for the error.
    """
    if not o.requires_grad:
        return o
    guarded: Tensor = _Guard.apply(o, real, name)
    return guarded


def refuse_second_order(name: str) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated itself.

    Autograd's ``once_differentiable`` would let the first pass through, and a penalty on its
    gradients would then have none of its own.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: create_graph=True asks for second derivatives, which it does not have"
        )


class _Guard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, real: Tensor | None, name: str) -> Tensor:
        ctx.real, ctx.name = real, name
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        refuse_second_order(ctx.name)
        return do if ctx.real is None else do.masked_fill(~ctx.real, 0), None, None
