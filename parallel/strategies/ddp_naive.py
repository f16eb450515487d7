"""parallel=ddp_naive: one all-reduce a parameter, after the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.registry import Look
from parallel.data import containers
from parallel.strategies._bases import DataParallelStrategy
from parallel.strategies.strategy import strategy


@strategy("ddp_naive", look=Look(colour="#555555", marker="o"))
@dataclass(kw_only=True, slots=True)
class NaiveDDPStrategy(DataParallelStrategy):
    """:class:`parallel.data.NaiveDDP` over the data ranks."""

    captures: ClassVar[bool] = True

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return containers.NaiveDDP(model, group=self.data_group())
