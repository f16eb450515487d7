"""One all-reduce for all gradients, after the backward pass: fewer calls than naive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.registry import Look
from parallel.strategies._data_parallel import BufferedStrategy
from parallel.strategy import strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@strategy("ddp_flat", look=Look(colour="#E69F00", marker="s"))
@dataclass(kw_only=True, slots=True)
class FlatDDPStrategy(BufferedStrategy):
    """:class:`parallel.data.FlatDDP` over the data ranks."""

    def loose_gradients(self, sizes: Sequence[float]) -> float:
        # All of them, until they are moved into the buffer after the backward pass.
        return 1.0

    def wrap(self, model: nn.Module) -> nn.Module:
        from parallel.data import FlatDDP

        return FlatDDP(model, group=self.data_group())
