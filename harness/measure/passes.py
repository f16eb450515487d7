"""Forward and backward pass of an attention call, launched each time or replayed as CUDA graphs."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from harness.cases.case import Case
from harness.measure.attention_calls import AttentionCall, learned
from kernels.launching.graphs import capture


def autocast(case: Case) -> contextlib.AbstractContextManager[None]:
    """The case's autocast context; a null context in a pure precision."""
    if case.precision.autocast is None:
        return contextlib.nullcontext()
    dtype = getattr(torch, case.precision.autocast)
    return torch.autocast(case.device, dtype=dtype)


class Passes:
    """Forward and backward of ``call`` on ``inputs``, which are q, k and v."""

    def __init__(
        self, case: Case, call: AttentionCall, inputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._case, self._call, self._inputs = case, call, inputs

    def forward(self) -> Tensor:
        """o, differentiable if the call's problem needs gradients."""
        with autocast(self._case), torch.set_grad_enabled(self._call.problem.needs_grad):
            return self._call.attend(*self._inputs)

    def backward(self, o: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        """dq, dk, dv and where the call has sinks theirs, from the last forward pass's output.

        Args:
            do: gradient of that output.
        """
        return torch.autograd.grad(o, (*self._inputs, *learned(self._call)), do)


class GraphedPasses(Passes):
    """Both passes as CUDA graphs, each captured at its first call and replayed from then on.

    A replay overwrites the results of the one before, and always reads the same ``do``.
    """

    def __init__(
        self, case: Case, call: AttentionCall, inputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        super().__init__(case, call, inputs)
        self._forward: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self._backward: tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]] | None = None
        self._do: Tensor | None = None

    def forward(self) -> Tensor:
        if self._forward is None:
            self._forward = capture(super().forward)
        graph, o = self._forward
        graph.replay()
        return o

    def backward(self, o: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        assert self._forward is not None, "a backward pass needs a forward pass"
        if self._backward is None:
            forward, backward = super().forward, super().backward
            self._backward = capture(
                lambda: backward(o, do),
                warm_up=lambda: backward(forward(), do),
                pool=self._forward[0].pool(),
            )
            self._do = do
        assert do is self._do, "a graph reads the gradient that it was captured with"
        graph, gradients = self._backward
        graph.replay()
        return gradients
