"""Containers that keep the replicas of a module equal: four schedules of averaging gradients.

    naive        one all-reduce a parameter, after the backward pass
    flat         one all-reduce for all parameters, after the backward pass
    overlapped   one all-reduce a parameter, as soon as its gradient is there
    bucketed     one all-reduce a bucket of parameters, as soon as its gradients are there

All take any module, and are used alike::

    model = BucketedDDP(module, bucket_size_mb=25)
    loss_of(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from parallel.data.data_parallel import DataParallel
from parallel.data.gradients import GradientTransfer, OneGradient, buckets_of

MIB = 2**20


class NaiveDDP(DataParallel):
    """One all-reduce a parameter, after the backward pass (problem naive_ddp)."""

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, overlap=False, group=group)

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        return [OneGradient(parameter) for parameter in parameters]


class FlatDDP(DataParallel):
    """One all-reduce for all gradients of a dtype, after the backward pass.

    Problem minimal_ddp_flat_benchmarking.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, overlap=False, group=group)

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        return buckets_of(parameters)


class OverlappedDDP(DataParallel):
    """One all-reduce a parameter, while the backward pass goes on.

    Problem ddp_overlap_individual_parameters.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, overlap=True, group=group)

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        return [OneGradient(parameter) for parameter in parameters]


class BucketedDDP(DataParallel):
    """One all-reduce a bucket, while the backward pass goes on (section 2.3.3).

    Buckets hold parameters in reverse order, at most ``bucket_size_mb`` MiB or one parameter that
    is larger; None makes one bucket of each dtype.

    Raises:
        ValueError: ``bucket_size_mb`` is not positive, or as :class:`DataParallel` says.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._max_bytes = bucket_bytes(bucket_size_mb)
        super().__init__(module, overlap=True, group=group)

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        return buckets_of(parameters, self._max_bytes)


def bucket_bytes(bucket_size_mb: float | None) -> float:
    """The size of a bucket in bytes; None is no limit.

    Raises:
        ValueError: it is not positive and finite.
    """
    if bucket_size_mb is None:
        return math.inf
    if not 0 < bucket_size_mb < math.inf:
        raise ValueError(f"bucket_size_mb={bucket_size_mb:g}: must be positive and finite")
    return bucket_size_mb * MIB
