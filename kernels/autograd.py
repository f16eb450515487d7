"""Makes an explicit forward and backward pass differentiable, once.

A backward pass by hand has no derivative of its own: what it saved, the lse above all, is a
constant to autograd. :func:`first_order_only` makes a second derivative through it an error, where
it would be wrong, or zero, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import sinks
from kernels.problem import AttentionSpec


class ExplicitPasses(Protocol):
    """The two passes of a :class:`kernels.backend.Attention`, and its name."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, /
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def attend(passes: ExplicitPasses, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Differentiable attention; saves q, k, v, o and the lse, never the score matrix."""
    o: Tensor = _AttentionFunction.apply(q, k, v, spec.sinks, passes, spec)
    return o


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_logits: Tensor | None,
        passes: ExplicitPasses,
        spec: AttentionSpec,
    ) -> Tensor:
        # What the passes see holds no sinks, of which autograd knows the tensor alone.
        keys = spec if sink_logits is None else replace(spec, sinks=None)
        o, lse = passes.forward(q, k, v, keys)
        if sink_logits is not None:
            o, lse = sinks.add(o, lse, sink_logits)
        ctx.save_for_backward(q, k, v, o, lse, sink_logits)
        ctx.passes, ctx.spec = passes, keys
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, lse, sink_logits = ctx.saved_tensors
        with torch.no_grad():
            gradients: tuple[Tensor, ...] = ctx.passes.backward(do, q, k, v, o, lse, ctx.spec)
            sources: tuple[Tensor, ...] = (do, q, k, v)
            if sink_logits is not None:
                gradients = (*gradients, sinks.gradient(do, o, lse, sink_logits))
                sources = (*sources, sink_logits)
        name = f"attention={ctx.passes.name}"
        found = first_order_only(name, gradients, sources)
        return *found, *(None,) * (6 - len(found))


def first_order_only(
    name: str,
    gradients: Sequence[Tensor],
    sources: Sequence[Tensor],
    instead: str = "attention=naive has them",
) -> Sequence[Tensor]:
    """The results of a backward pass, through which a second derivative is an error.

    Autograd's ``once_differentiable`` looks at the gradients that reach the pass alone, which are
    constants if the loss is linear in the output, and its error has no edge to the inputs, so that
    ``torch.autograd.grad`` passes it by. Both times the second order would be dropped.

    Args:
        name: of what was called, for the error.
        sources: all that the gradients depend on and autograd may follow: the pass's own incoming
            gradients, and the inputs of the forward pass.
        instead: the rest of the error, what has second derivatives.
    """
    # Only create_graph=True enables gradients here; torch.compile has an error of its own.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return gradients
    message = f"{name}: second derivatives are not available; {instead}"
    found: tuple[Tensor, ...] = _FirstOrder.apply(message, len(gradients), *gradients, *sources)
    return found


class _FirstOrder(torch.autograd.Function):
    """Its first tensors as they are, depending on all of them, with an error for a derivative."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(ctx.message)
