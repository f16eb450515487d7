"""One all-reduce a bucket of gradients, each started as soon as backward has filled it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel._data_parallel import BufferedStrategy
from parallel.strategy import strategy

if TYPE_CHECKING:
    from torch import nn


@strategy("ddp_bucketed")
@dataclass(kw_only=True, slots=True)
class BucketedDDPStrategy(BufferedStrategy):
    """:class:`parallel.data_parallel.BucketedDDP` over the data ranks."""

    bucket_size_mb: float = 25.0
    """Gradients are all-reduced in buckets of at most this many MiB; 25 as PyTorch's DDP."""

    def __post_init__(self) -> None:
        BufferedStrategy.__post_init__(self)
        if not 0 < self.bucket_size_mb < math.inf:
            raise ValueError(
                f"parallel.bucket_size_mb={self.bucket_size_mb:g}: must be positive and finite"
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        from parallel.data_parallel import BucketedDDP

        return BucketedDDP(model, self.bucket_size_mb, group=self.data_group())
