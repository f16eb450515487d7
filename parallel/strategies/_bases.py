"""Bases of the data-parallel strategies: replicated, sharded and fully sharded training state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from parallel.data import data_parallel, elementwise_optimizer
from parallel.strategies.strategy import Strategy

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(kw_only=True, slots=True)
class DataParallelStrategy(Strategy):
    """Replicas on the data ranks, two by default; ``wrap`` returns one of our containers."""

    dp: int = 2

    def after_backward(self, model: torch.nn.Module) -> None:
        cast("data_parallel.DataParallel", model).finish_gradient_synchronization()


@dataclass(kw_only=True, slots=True)
class BufferedStrategy(DataParallelStrategy):
    """Replicas whose gradients lie in buffers, from the start and between steps."""

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        return 1.0 if self.data_ranks > 1 else 0.0


@dataclass(kw_only=True, slots=True)
class ShardedStateStrategy(DataParallelStrategy):
    """Optimizer state in shards: the wrapped model's ``parameters()`` are this rank's shards."""

    improves_on: ClassVar[str | None] = None

    @property
    def optimizer_state_share(self) -> float:
        return 1 / self.data_ranks

    def optimizer(
        self, params: Iterable[torch.nn.Parameter], cls: type[torch.optim.Optimizer], **kwargs: Any
    ) -> torch.optim.Optimizer:
        return elementwise_optimizer.optimizer_of_shards(params, cls, **kwargs)

    @property
    def gradients_differ(self) -> bool:
        return True


@dataclass(kw_only=True, slots=True)
class FullyShardedStrategy(DataParallelStrategy):
    """Parameters, gradients and optimizer state in shards."""

    casts_shares: ClassVar[bool] = True

    compute_dtype: str | None = None
    """dtype that weights are gathered and used in, and gradients reduced in; the weights that the
    optimizer updates stay as they are. None gathers them in that dtype."""

    def __post_init__(self) -> None:
        DataParallelStrategy.__post_init__(self)
        if self.compute_dtype is not None and self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"parallel.compute_dtype={self.compute_dtype}: must be null or one of "
                f"{', '.join(COMPUTE_DTYPES)}"
            )

    @property
    def parameter_share(self) -> float:
        return 1 / self.data_ranks

    @property
    def gradient_share(self) -> float:
        return 1 / self.data_ranks

    @property
    def optimizer_state_share(self) -> float:
        return 1 / self.data_ranks

    @property
    def exchange_dtype(self) -> str | None:
        return self.compute_dtype

    def torch_dtype(self) -> torch.dtype | None:
        return None if self.compute_dtype is None else getattr(torch, self.compute_dtype)

    @property
    def gradients_differ(self) -> bool:
        return True
