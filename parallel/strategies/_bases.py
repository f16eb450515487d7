"""Bases of the data-parallel strategies: replicated, sharded and fully sharded training state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from kernels.registry import joined_later
from parallel.data import data_parallel, elementwise_optimizer, hybrid_sharding
from parallel.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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

    captures: ClassVar[bool] = False
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
    shard_group: int | None = joined_later(None)
    """Hybrid sharding: so many neighbours share out a copy of the weights, such as the ranks of one
    host, and gradients are all-reduced between copies. None shares out one copy over all ranks."""

    def __post_init__(self) -> None:
        DataParallelStrategy.__post_init__(self)
        if self.compute_dtype is not None and self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"parallel.compute_dtype={self.compute_dtype}: must be null or one of "
                f"{', '.join(COMPUTE_DTYPES)}"
            )
        if self.shard_group is not None and (
            self.shard_group < 2 or self.data_ranks % self.shard_group
        ):
            raise ValueError(
                f"parallel.shard_group={self.shard_group}: must be at least 2 and divide the "
                f"{self.data_ranks} ranks of parallel.dp={self.dp} x parallel.cp={self.cp}"
            )

    @property
    def shard_ranks(self) -> int:
        """Ranks that share out one copy of the weights."""
        return self.shard_group or self.data_ranks

    @property
    def copies(self) -> int:
        """Groups of ranks with a copy each."""
        return self.data_ranks // self.shard_ranks

    def hybrid_mesh(self) -> DeviceMesh:
        """Axes replicate and shard, and tp, of the world; where there are several copies."""
        return hybrid_sharding.hybrid_mesh(self.shard_ranks, dp=self.dp, cp=self.cp, tp=self.tp)

    @property
    def parameter_share(self) -> float:
        return 1 / self.shard_ranks

    @property
    def gradient_share(self) -> float:
        return 1 / self.shard_ranks

    @property
    def optimizer_state_share(self) -> float:
        return 1 / self.shard_ranks

    @property
    def traffic(self) -> dict[str, float]:
        inside = DataParallelStrategy.traffic.__get__(self)
        return {**inside, "all_reduce": 1 / self.shard_ranks} if self.copies > 1 else inside

    def predicted_ranks(self, collective: str) -> tuple[int, int]:
        if collective == "all_reduce":
            return self.copies, self.shard_ranks
        return self.shard_ranks, 1

    @property
    def exchange_dtype(self) -> str | None:
        return self.compute_dtype

    def torch_dtype(self) -> torch.dtype | None:
        return None if self.compute_dtype is None else getattr(torch, self.compute_dtype)

    @property
    def gradients_differ(self) -> bool:
        return True
