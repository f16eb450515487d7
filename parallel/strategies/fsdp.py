"""Fully sharded data parallelism: weights are gathered block by block, when they are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.registry import Look
from parallel.strategies._fully_sharded import FullyShardedStrategy
from parallel.strategy import strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@strategy("fsdp", look=Look(colour="#332288", marker="p"))
@dataclass(kw_only=True, slots=True)
class FSDPStrategy(FullyShardedStrategy):
    """:class:`parallel.data.FSDP` over the data ranks."""

    peer: ClassVar[str | None] = "fsdp_torch"

    replicate_below: int = 2**15
    """Parameters of fewer elements, such as norms, are whole on every rank."""

    def __post_init__(self) -> None:
        FullyShardedStrategy.__post_init__(self)
        if self.replicate_below < 0:
            raise ValueError(f"parallel.replicate_below={self.replicate_below}: must be at least 0")

    def wrap(self, model: nn.Module) -> nn.Module:
        from parallel.data import FSDP

        return FSDP(
            model,
            compute_dtype=self.torch_dtype(),
            replicate_below=self.replicate_below,
            group=self.data_group(),
        )

    def optimizer(
        self, params: Iterable[nn.Parameter], cls: type[Optimizer], **kwargs: Any
    ) -> Optimizer:
        from parallel.data import optimizer_of_shards

        return optimizer_of_shards(params, cls, **kwargs)
