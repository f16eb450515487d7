"""What the strategies of data parallelism share: two ranks unless more are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from parallel.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from parallel.data.containers import DataParallel


@dataclass(kw_only=True, slots=True)
class DataParallelStrategy(Strategy):
    """A strategy whose ``wrap`` returns a container that averages gradients over the data ranks."""

    dp: int = 2

    def after_backward(self, model: nn.Module) -> None:
        cast("DataParallel", model).finish_gradient_synchronization()


@dataclass(kw_only=True, slots=True)
class BufferedStrategy(DataParallelStrategy):
    """One whose gradients live in buffers, from the start and between steps."""

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        return 1.0 if self.data_ranks > 1 else 0.0
