"""One all-reduce a parameter, after the backward pass: the simplest data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.registry import Look
from parallel.strategies._data_parallel import DataParallelStrategy
from parallel.strategy import strategy

if TYPE_CHECKING:
    from torch import nn


@strategy("ddp_naive", look=Look(colour="#555555", marker="o"))
@dataclass(kw_only=True, slots=True)
class NaiveDDPStrategy(DataParallelStrategy):
    """:class:`parallel.data.NaiveDDP` over the data ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        from parallel.data import NaiveDDP

        return NaiveDDP(model, group=self.data_group())
