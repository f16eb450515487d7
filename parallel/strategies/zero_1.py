"""ZeRO-1: gradients reduce-scattered, each rank's part updated, parameters all-gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from kernels.registry import Look
from parallel.strategies._data_parallel import BufferedStrategy
from parallel.strategies._parts import PartsStrategy
from parallel.strategies.ddp_bucketed import BucketedDDPStrategy
from parallel.strategy import strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from parallel.data.zero import Zero


@strategy("zero_1", look=Look(colour="#DDCC77", marker="<"))
@dataclass(kw_only=True, slots=True)
class Zero1Strategy(PartsStrategy, BucketedDDPStrategy):
    """:class:`parallel.data.Zero1` over the data ranks; sends as much as DDP."""

    peer: ClassVar[str | None] = "ddp_bucketed"

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        # Of one parameter too: the buffer is what ranks receive their parts in.
        return BufferedStrategy.gradient_buffers(self, sizes)

    def wrap(self, model: nn.Module) -> nn.Module:
        from parallel.data import Zero1

        return Zero1(model, self.bucket_size_mb, group=self.data_group())

    def finish(self, model: nn.Module) -> None:
        # The weights of a forward pass that does not come.
        cast("Zero", model).wait_for_gathering()
