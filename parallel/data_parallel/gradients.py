"""What one all-reduce averages: the gradient of one parameter, or a bucket of gradients.

Both are started once the gradients in them are complete and finished after the backward pass.
A parameter that has no gradient on this rank counts as zeros, since other ranks may have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Averaged(Protocol):
    """Gradients that travel together."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients they are."""

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to average over the group; every rank starts the same ones in the same order."""

    def wait(self) -> None:
        """The averages are there for what follows on the current stream."""

    def average(self, place: int) -> Tensor:
        """The average of parameter number ``place``, with that parameter's shape."""


class OneGradient:
    """The gradient of one parameter, averaged where it is."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameters = (parameter,)
        self._gradient: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup) -> None:
        (parameter,) = self.parameters
        gradient = parameter.grad
        self._gradient = torch.zeros_like(parameter) if gradient is None else gradient
        self._work = start_average(self._gradient, group)

    def wait(self) -> None:
        assert self._work is not None, "started before"
        self._work.wait()
        self._work = None

    def average(self, place: int) -> Tensor:
        assert self._gradient is not None, "started before"
        return self._gradient


class Bucket:
    """Gradients of one dtype in one buffer; each parameter's ``grad`` is a view of it.

    A gradient that is in its view already is not moved: after ``zero_grad(set_to_none=False)``,
    and where gradients accumulate. One that autograd has made anew, as after
    ``zero_grad(set_to_none=True)``, is moved in once. That reads and writes it once each;
    zeroing the bucket for autograd to add to would write it twice and read two operands.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views = []
        offset = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            # An optimizer's fused kernels want a gradient laid out as its parameter is.
            strides = torch.empty_like(parameter, device="meta").stride()
            self._views.append(self._buffer.as_strided(parameter.shape, strides, offset))
            offset += size
        self._work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup) -> None:
        self._gather()
        self._work = start_average(self._buffer, group)

    def _gather(self) -> None:
        """Bring every gradient into its view."""
        made, places = [], []
        for parameter, view in zip(self.parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                made.append(gradient)
                places.append(view)
                parameter.grad = view
        if made:
            torch._foreach_copy_(places, made)

    def wait(self) -> None:
        assert self._work is not None, "started before"
        self._work.wait()
        self._work = None

    def average(self, place: int) -> Tensor:
        return self._views[place]


def start_average(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to replace ``tensor`` by its mean over the group.

    Every rank's part is divided before the sum, which float16 might not hold.
    """
    if dist.get_backend(group) == "nccl":
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True)
    else:
        tensor.div_(group.size())
        work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "async_op returns a handle to members of the group"
    return work


def buckets_of(parameters: Iterable[nn.Parameter], max_bytes: float = math.inf) -> list[Bucket]:
    """Buckets of at most ``max_bytes``, each of one dtype, in the order of the parameters.

    A parameter that is larger than that has a bucket of its own.
    """
    open_buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    room: dict[torch.dtype, float] = {}
    full: list[list[nn.Parameter]] = []
    for parameter in parameters:
        dtype, num_bytes = parameter.dtype, parameter.numel() * parameter.element_size()
        if dtype in open_buckets and num_bytes > room[dtype]:
            full.append(open_buckets.pop(dtype))
        if dtype not in open_buckets:
            open_buckets[dtype], room[dtype] = [], max_bytes
        open_buckets[dtype].append(parameter)
        room[dtype] -= num_bytes
    return [Bucket(members) for members in (*full, *open_buckets.values())]
