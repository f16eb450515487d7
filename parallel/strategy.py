"""What a strategy is: a way to train one model on many devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim import Optimizer

STRATEGIES: Registry[type[Strategy]] = Registry("parallel", packages=("parallel",))

strategy = STRATEGIES.register


@dataclass(kw_only=True, slots=True)
class Strategy:
    """A choice of ``parallel=``; the defaults do nothing, which is right for one device."""

    name: str
    dp: int = 1
    """Ranks of the data-parallel mesh axis: each trains on its own batch."""

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise ValueError(f"parallel.dp={self.dp}: must be at least 1")

    @property
    def world_size(self) -> int:
        return self.dp

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare the model, already on its device, for training; called once."""
        return model

    def after_backward(self) -> None:
        """Called after every backward pass, before the optimizer."""

    def optimizer(
        self, params: Iterable[nn.Parameter], cls: type[Optimizer], **kwargs: Any
    ) -> Optimizer:
        """Make the optimizer over this rank's parameters."""
        return cls(params, **kwargs)
