"""parallel=fsdp: fully sharded data parallelism, weights gathered block by block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kernels.registry import Look
from parallel.data import elementwise_optimizer, hybrid_sharding
from parallel.data.fsdp import container
from parallel.strategies._bases import FullyShardedStrategy
from parallel.strategies.strategy import Strategy, strategy


@strategy("fsdp", look=Look(colour="#332288", marker="p"))
@dataclass(kw_only=True, slots=True)
class FSDPStrategy(FullyShardedStrategy):
    """:class:`parallel.data.FSDP` over the data ranks, or over groups of them with a copy each."""

    peer: ClassVar[str | None] = "fsdp_torch"

    replicate_below: int = 2**15
    """Parameters of fewer elements, such as norms, are whole on every rank."""

    def __post_init__(self) -> None:
        FullyShardedStrategy.__post_init__(self)
        if self.replicate_below < 0:
            raise ValueError(f"parallel.replicate_below={self.replicate_below}: must be at least 0")

    def in_units_of(self, num_bytes: int) -> Strategy:
        # A block is a unit; of a small model, more than its norms should be sharded.
        return replace(self, replicate_below=min(self.replicate_below, num_bytes // 256))

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        group, copies = self.data_group(), None
        if self.copies > 1:
            mesh = self.hybrid_mesh()
            group = mesh.get_group(hybrid_sharding.SHARD)
            copies = mesh.get_group(hybrid_sharding.REPLICATE)
        return container.FSDP(
            model,
            compute_dtype=self.torch_dtype(),
            replicate_below=self.replicate_below,
            group=group,
            replicate_group=copies,
        )

    def optimizer(
        self, params: Iterable[torch.nn.Parameter], cls: type[torch.optim.Optimizer], **kwargs: Any
    ) -> torch.optim.Optimizer:
        return elementwise_optimizer.optimizer_of_shards(params, cls, **kwargs)
