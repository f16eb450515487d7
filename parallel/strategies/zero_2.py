"""parallel=zero_2: as ZeRO-1, and each rank keeps only the gradients of its shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from kernels.registry import Look
from parallel.data import zero
from parallel.strategies._bases import ShardedStateStrategy
from parallel.strategies.ddp_bucketed import BucketedDDPStrategy
from parallel.strategies.strategy import strategy


@strategy("zero_2", look=Look(colour="#999933", marker=">"))
@dataclass(kw_only=True, slots=True)
class Zero2Strategy(ShardedStateStrategy, BucketedDDPStrategy):
    """:class:`parallel.data.Zero2` over the data ranks."""

    peer: ClassVar[str | None] = "ddp_bucketed"

    @property
    def gradient_share(self) -> float:
        return 1 / self.data_ranks

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        # A bucket's buffer lives from its first gradient until it is reduced.
        return 0.0

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return zero.Zero2(model, self.bucket_size_mb, group=self.data_group())

    def finish(self, model: torch.nn.Module) -> None:
        # Weights are being gathered for a forward pass that will not come.
        cast("zero.Zero", model).wait_for_gathering()
