"""What one all-reduce averages: the gradient of one parameter, or a bucket of gradients.

Both are started once the gradients in them are complete and finished after the backward pass.
A parameter that has no gradient on this rank counts as zeros, since other ranks may have one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.flat import Averaging, FlatLayout, grouped


class Averaged(Protocol):
    """Gradients that travel together."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients they are."""

    @property
    def absent(self) -> Sequence[int]:
        """Places in ``parameters`` of those that had no gradient on this rank at the start."""

    def start(self, averaging: Averaging | None) -> None:
        """Begin to average; every rank starts the same ones in the same order.

        None where this rank is alone, and what only converts gradients has work all the same.
        """

    def wait(self) -> None:
        """The averages are there for what follows on the current stream; may be called again."""

    def give(self, place: int) -> None:
        """Have an absent gradient be the average too, since other ranks had one."""


class OneGradient:
    """The gradient of one parameter, averaged where it is."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameters = (parameter,)
        self.absent: list[int] = []
        self._absent: Tensor | None = None
        """In place of a gradient that is not here; others are their parameters' alone."""
        self._work: dist.Work | None = None

    def start(self, averaging: Averaging | None) -> None:
        assert averaging is not None, "one rank has nothing to average"
        (parameter,) = self.parameters
        gradient = parameter.grad
        self.absent, self._absent = [], None
        if gradient is None:
            self.absent = [0]
            self._absent = gradient = torch.zeros_like(parameter)
        self._work = averaging.start(gradient)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def give(self, place: int) -> None:
        self.parameters[place].grad, self._absent = self._absent, None


class Bucket:
    """Gradients of one dtype in one buffer; each parameter's ``grad`` is a view of it.

    A gradient that is in its view already is not moved: after ``zero_grad(set_to_none=False)``,
    and where gradients accumulate. One that autograd has made anew, as after
    ``zero_grad(set_to_none=True)``, is moved in once. That reads and writes it once each;
    zeroing the bucket for autograd to add to would write it twice and read two operands.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.absent: list[int] = []
        first, layout = parameters[0], FlatLayout(parameters)
        self._buffer = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self._views = layout.views(self._buffer)
        self._work: dist.Work | None = None

    def start(self, averaging: Averaging | None) -> None:
        assert averaging is not None, "one rank has nothing to average"
        self._gather()
        self._work = averaging.start(self._buffer)

    def _gather(self) -> None:
        """Bring every gradient into its view."""
        made, places = [], []
        self.absent = []
        for number, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                self.absent.append(number)
                view.zero_()
            elif gradient is not view:
                made.append(gradient)
                places.append(view)
                parameter.grad = view
        if made:
            torch._foreach_copy_(places, made)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def give(self, place: int) -> None:
        self.parameters[place].grad = self._views[place]


def buckets_of(
    parameters: Sequence[nn.Parameter], max_bytes: float = math.inf
) -> list[Bucket | OneGradient]:
    """Buckets of at most ``max_bytes``, as :func:`grouped` makes them.

    One parameter that fills a bucket alone needs none: its gradient travels from where it is,
    and is not copied.
    """
    return [
        Bucket(members) if len(members) > 1 else OneGradient(members[0])
        for members in grouped(parameters, max_bytes)
    ]
