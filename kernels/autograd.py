"""Makes an explicit forward and backward pass differentiable."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.problem import AttentionSpec


class ExplicitPasses(Protocol):
    """The two passes of a :class:`kernels.backend.Attention`."""

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
    o: Tensor = _AttentionFunction.apply(q, k, v, passes, spec)
    return o


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, passes: ExplicitPasses, spec: AttentionSpec
    ) -> Tensor:
        o, lse = passes.forward(q, k, v, spec)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.passes, ctx.spec = passes, spec
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        return *ctx.passes.backward(do, *ctx.saved_tensors, ctx.spec), None, None
