"""No data parallelism: one device, or several that hold parts of the same sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.strategy import Strategy, strategy

if TYPE_CHECKING:
    from torch import nn


@strategy("none")
@dataclass(kw_only=True, slots=True)
class NoDataParallelism(Strategy):
    """The model as it is; where sequences are split, gradients are averaged after backward."""

    def __post_init__(self) -> None:
        Strategy.__post_init__(self)
        if self.dp != 1:
            raise ValueError(
                f"parallel.dp={self.dp}: parallel=none trains on one batch; "
                "choose a strategy that keeps ranks together, such as parallel=ddp_torch"
            )

    def after_backward(self, model: nn.Module) -> None:
        if self.cp == 1:
            return
        from parallel._gradients import average

        average(model.parameters(), self.cp_group())
