"""parallel=ddp_flat: one all-reduce for all gradients, after the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.registry import Look
from parallel.data import containers
from parallel.strategies._bases import BufferedStrategy
from parallel.strategies.strategy import strategy


@strategy("ddp_flat", look=Look(colour="#E69F00", marker="s"))
@dataclass(kw_only=True, slots=True)
class FlatDDPStrategy(BufferedStrategy):
    """:class:`parallel.data.FlatDDP` over the data ranks."""

    captures: ClassVar[bool] = True
    improves_on: ClassVar[str | None] = "ddp_naive"

    def loose_gradients(self, sizes: Sequence[float]) -> float:
        # All gradients, until they are copied into the buffer after the backward pass.
        return 1.0

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return containers.FlatDDP(model, group=self.data_group())
