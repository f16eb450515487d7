"""One all-reduce a parameter, each started as soon as backward has made its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.registry import Look
from parallel.strategies._data_parallel import DataParallelStrategy
from parallel.strategy import strategy

if TYPE_CHECKING:
    from torch import nn


@strategy("ddp_overlapped", look=Look(colour="#56B4E9", marker="D"))
@dataclass(kw_only=True, slots=True)
class OverlappedDDPStrategy(DataParallelStrategy):
    """:class:`parallel.data.OverlappedDDP` over the data ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        from parallel.data import OverlappedDDP

        return OverlappedDDP(model, group=self.data_group())
