"""Transfers that average gradients over ranks: of one parameter, or of a bucket of parameters.

Both start once their gradients are complete, and are waited for after the backward pass. A
parameter without a gradient on this rank counts as zeros, since other ranks may have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.buckets import bucket_tensors
from parallel.data.flat import FlatLayout


class Averager:
    """Starts averages over a group; every rank's values are divided before they are summed.

    float16 might not hold the sum. Options are prepared once: a step has hundreds of calls, and
    where the GPU is the faster of the two, it waits for what each costs the host.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        averages = dist.get_backend(group) == "nccl"
        operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._divisor = None if averages else group.size()
        self._reducing, self._scattering = dist.AllreduceOptions(), dist.ReduceScatterOptions()
        for options in (self._reducing, self._scattering):
            options.reduceOp = operation
            # Otherwise NCCL runs on the current stream, and later work waits for it.
            options.asyncOp = True
        # Renamed in torch 2.13.
        self._reduce_scatter = (
            getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
        )

    def start(self, tensor: Tensor, received: Tensor | None = None) -> dist.Work:
        """Begin to average ``tensor``: in place, or this rank's shard of it into ``received``.

        With ``received`` (reduce-scatter) ``tensor`` is not to be read again; ``received`` may
        be its shard of ``tensor``.
        """
        if self._divisor is not None:
            tensor.div_(self._divisor)
        # Not dist.all_reduce and the like, which repeat checks that were made here.
        if received is None:
            return self._group.allreduce([_real(tensor)], self._reducing)
        work: dist.Work = self._reduce_scatter(_real(received), _real(tensor), self._scattering)
        return work


class GradientTransfer(Protocol):
    """Gradients that one collective call averages."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients travel."""

    @property
    def absent(self) -> Sequence[int]:
        """Places in ``parameters`` of those without a gradient on this rank at the start."""

    def start(self, averager: Averager | None) -> None:
        """Begin to average; every rank starts the same transfers in the same order.

        Args:
            averager: None where this rank is alone, and gradients may still have to be converted.
        """

    def wait(self) -> None:
        """Make the current stream wait for the averages; may be called again."""

    def give(self, place: int) -> None:
        """Set an absent gradient to the average, since other ranks had one."""


class OneGradient:
    """The gradient of one parameter, averaged where it is."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameters = (parameter,)
        self.absent: list[int] = []
        self._absent: Tensor | None = None
        """Zeros in place of a gradient that this rank does not have."""
        self._work: dist.Work | None = None

    def start(self, averager: Averager | None) -> None:
        assert averager is not None, "one rank has nothing to average"
        (parameter,) = self.parameters
        gradient = parameter.grad
        self.absent, self._absent = [], None
        if gradient is None:
            self.absent = [0]
            self._absent = gradient = torch.zeros_like(parameter)
        self._work = averager.start(gradient)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def give(self, place: int) -> None:
        self.parameters[place].grad, self._absent = self._absent, None


class Bucket:
    """Gradients of one dtype in one buffer; each parameter's ``grad`` is a view of it.

    A gradient that is its view already is not copied: after ``zero_grad(set_to_none=False)``, and
    where gradients accumulate. One that autograd has made anew, as after
    ``zero_grad(set_to_none=True)``, is copied once, which reads and writes it once each; zeroing
    the bucket for autograd to add to would write it twice and read two operands.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.absent: list[int] = []
        first, layout = parameters[0], FlatLayout(parameters)
        self._buffer = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self._views = layout.views(self._buffer)
        self._work: dist.Work | None = None

    def start(self, averager: Averager | None) -> None:
        assert averager is not None, "one rank has nothing to average"
        self._gather()
        self._work = averager.start(self._buffer)

    def _gather(self) -> None:
        """Copy every gradient into its view."""
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
    """Transfers of buckets of at most ``max_bytes``, as :func:`bucket_tensors` makes them.

    A parameter that fills a bucket alone needs none: its gradient travels from where it is.
    """
    return [
        Bucket(members) if len(members) > 1 else OneGradient(members[0])
        for members in bucket_tensors(parameters, max_bytes)
    ]


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the group; parameters without one are passed over.

    One all-reduce a gradient, all of them started before the first is waited for.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    works = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]
    for work, gradient in zip(works, gradients, strict=True):
        work.wait()
        gradient.div_(group.size())


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which collectives can average."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
