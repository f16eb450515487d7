"""parallel=zero_1: gradients reduce-scattered, shards updated, parameters all-gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from kernels.registry import Look
from parallel.data import zero
from parallel.strategies._bases import BufferedStrategy, ShardedStateStrategy
from parallel.strategies.ddp_bucketed import BucketedDDPStrategy
from parallel.strategies.strategy import strategy


@strategy("zero_1", look=Look(colour="#DDCC77", marker="<"))
@dataclass(kw_only=True, slots=True)
class Zero1Strategy(ShardedStateStrategy, BucketedDDPStrategy):
    """:class:`parallel.data.Zero1` over the data ranks; sends as much as DDP."""

    peer: ClassVar[str | None] = "ddp_bucketed"

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        # Even of one parameter: ranks receive their shards in the buffer.
        return BufferedStrategy.gradient_buffers(self, sizes)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return zero.Zero1(model, self.bucket_size_mb, group=self.data_group())

    def finish(self, model: torch.nn.Module) -> None:
        # Weights are being gathered for a forward pass that will not come.
        cast("zero.Zero", model).wait_for_gathering()
