"""parallel=sharded_optimizer: bucketed data parallelism with sharded optimizer state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernels.registry import Look
from parallel.data import sharded_optimizer
from parallel.strategies.ddp_bucketed import BucketedDDPStrategy
from parallel.strategies.strategy import strategy


@strategy("sharded_optimizer", look=Look(colour="#009E73", marker="P"))
@dataclass(kw_only=True, slots=True)
class ShardedOptimizerStrategy(BucketedDDPStrategy):
    """:class:`parallel.data.ShardedOptimizer`: updated parameters are broadcast."""

    improves_on: ClassVar[str | None] = None

    peer: ClassVar[str | None] = "zero_redundancy_torch"

    @property
    def optimizer_state_share(self) -> float:
        return 1 / self.data_ranks

    @property
    def traffic(self) -> dict[str, float]:
        return {"all_reduce": 1.0, "broadcast": 1.0} if self.world_size > 1 else {}

    def optimizer(
        self, params: Iterable[torch.nn.Parameter], cls: type[torch.optim.Optimizer], **kwargs: Any
    ) -> torch.optim.Optimizer:
        return sharded_optimizer.ShardedOptimizer(
            params, cls, process_group=self.data_group(), **kwargs
        )
