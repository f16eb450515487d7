"""parallel=ddp_bucketed: one all-reduce a bucket of gradients, as soon as it is full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kernels.registry import Look
from parallel.data import containers
from parallel.data.buckets import fill_buckets
from parallel.strategies._bases import BufferedStrategy
from parallel.strategies.strategy import Strategy, strategy


@strategy("ddp_bucketed", look=Look(colour="#0072B2", marker="^"))
@dataclass(kw_only=True, slots=True)
class BucketedDDPStrategy(BufferedStrategy):
    """:class:`parallel.data.BucketedDDP` over the data ranks."""

    captures: ClassVar[bool] = True
    improves_on: ClassVar[str | None] = "ddp_overlapped"

    bucket_size_mb: float = 25.0
    """Gradients are all-reduced in buckets of at most this many MiB; 25 as PyTorch's DDP."""

    def __post_init__(self) -> None:
        BufferedStrategy.__post_init__(self)
        if not 0 < self.bucket_size_mb < math.inf:
            raise ValueError(
                f"parallel.bucket_size_mb={self.bucket_size_mb:g}: must be positive and finite"
            )

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        if self.data_ranks == 1:
            return 0.0
        # A gradient that fills a bucket alone is not copied into a buffer.
        buckets = fill_buckets(reversed(sizes), self.bucket_size_mb * 2**20)
        return sum(sum(bucket) for bucket in buckets if len(bucket) > 1) / sum(sizes)

    def in_units_of(self, num_bytes: int) -> Strategy:
        return replace(self, bucket_size_mb=min(self.bucket_size_mb, num_bytes / 2**20))

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return containers.BucketedDDP(model, self.bucket_size_mb, group=self.data_group())
