"""What the strategies share of which every rank trains a part of the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel.strategies._data_parallel import DataParallelStrategy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(kw_only=True, slots=True)
class PartsStrategy(DataParallelStrategy):
    """A strategy whose wrapped model has parts of parameters as its ``parameters()``."""

    @property
    def optimizer_state_share(self) -> float:
        return 1 / self.data_ranks

    def optimizer(
        self, params: Iterable[nn.Parameter], cls: type[Optimizer], **kwargs: Any
    ) -> Optimizer:
        from parallel.data import optimizer_of_shards

        return optimizer_of_shards(params, cls, **kwargs)

    @property
    def gradients_differ(self) -> bool:
        return True
