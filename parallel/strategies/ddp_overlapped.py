"""parallel=ddp_overlapped: one all-reduce a parameter, as soon as its gradient is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.registry import Look
from parallel.data import containers
from parallel.strategies._bases import DataParallelStrategy
from parallel.strategies.strategy import strategy


@strategy("ddp_overlapped", look=Look(colour="#56B4E9", marker="D"))
@dataclass(kw_only=True, slots=True)
class OverlappedDDPStrategy(DataParallelStrategy):
    """:class:`parallel.data.OverlappedDDP` over the data ranks."""

    captures: ClassVar[bool] = True
    improves_on: ClassVar[str | None] = "ddp_flat"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return containers.OverlappedDDP(model, group=self.data_group())
