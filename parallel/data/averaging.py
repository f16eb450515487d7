"""Averages gradients over ranks, all at once after the backward pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn


def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the group; parameters without one are passed over.

    One all-reduce a gradient, all of them started before the first is waited for.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    works = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]
    for work, gradient in zip(works, gradients, strict=True):
        work.wait()
        gradient.div_(group.size())
