"""parallel=zero_redundancy_torch: PyTorch's ZeroRedundancyOptimizer on its DDP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.registry import Look
from parallel.strategies.ddp_torch import TorchDDP
from parallel.strategies.strategy import strategy


@strategy("zero_redundancy_torch", look=Look(colour="#AA4499", marker="X"))
@dataclass(kw_only=True, slots=True)
class TorchZeroRedundancy(TorchDDP):
    """Each rank keeps the state of some whole parameters, and broadcasts them when updated."""

    @property
    def optimizer_state_share(self) -> float:
        return 1 / self.data_ranks

    @property
    def traffic(self) -> dict[str, float]:
        return {"all_reduce": 1.0, "broadcast": 1.0} if self.world_size > 1 else {}

    def optimizer(
        self, params: Iterable[torch.nn.Parameter], cls: type[torch.optim.Optimizer], **kwargs: Any
    ) -> torch.optim.Optimizer:
        if self.data_ranks == 1:
            return cls(params, **kwargs)
        # ``import torch`` does not load this module.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            params,
            optimizer_class=cls,
            process_group=self.data_group(),
            parameters_as_bucket_view=True,
            **kwargs,
        )
