"""ZeRO-2: as ZeRO-1, and of gradients too each rank keeps only those of its part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from kernels.registry import Look
from parallel.strategies._parts import PartsStrategy
from parallel.strategies.ddp_bucketed import BucketedDDPStrategy
from parallel.strategy import strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from parallel.data.zero import Zero


@strategy("zero_2", look=Look(colour="#999933", marker=">"))
@dataclass(kw_only=True, slots=True)
class Zero2Strategy(PartsStrategy, BucketedDDPStrategy):
    """:class:`parallel.data.Zero2` over the data ranks."""

    peer: ClassVar[str | None] = "ddp_bucketed"

    @property
    def gradient_share(self) -> float:
        return 1 / self.data_ranks

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        # A bucket's is there from its first gradient until it is reduced.
        return 0.0

    def wrap(self, model: nn.Module) -> nn.Module:
        from parallel.data import Zero2

        return Zero2(model, self.bucket_size_mb, group=self.data_group())

    def finish(self, model: nn.Module) -> None:
        # The weights of a forward pass that does not come.
        cast("Zero", model).wait_for_gathering()
