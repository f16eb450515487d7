"""parallel=none: no data parallelism; one device, or several on the axes cp and tp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.registry import Look
from parallel.data import gradients
from parallel.strategies.strategy import Strategy, strategy


@strategy("none", look=Look(colour="#000000", marker="h"))
@dataclass(kw_only=True, slots=True)
class NoDataParallelism(Strategy):
    """One batch; where its sequences are split, gradients are averaged after backward."""

    captures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Strategy.__post_init__(self)
        if self.dp != 1:
            raise ValueError(
                f"parallel.dp={self.dp}: parallel=none trains on one batch; "
                "choose a strategy that keeps ranks together, such as parallel=ddp_torch"
            )

    def after_backward(self, model: torch.nn.Module) -> None:
        if self.cp == 1:
            return
        group = self.data_group()
        assert group is not None, "several ranks have a group"
        gradients.average_gradients(model.parameters(), group)
