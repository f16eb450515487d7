"""What a strategy is: a way to train one model on many devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.registry import Registry, joined_later

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist
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
    cp: int = joined_later(1)
    """Ranks of the context-parallel mesh axis: each holds a part of every sequence."""

    def __post_init__(self) -> None:
        for axis in ("dp", "cp"):
            value = getattr(self, axis)
            if value < 1:
                raise ValueError(f"parallel.{axis}={value}: must be at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.cp

    def cp_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's sequences; all ranks of the world call it together."""
        from parallel._mesh import cp_group

        return cp_group(self.dp, self.cp)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare the model, already on its device, for training; called once."""
        return model

    def after_backward(self, model: nn.Module) -> None:
        """Called after every backward pass, before the optimizer, with the wrapped model.

        From here on gradients are averages over all ranks, of both axes.
        """

    @property
    def synchronizes_after_backward(self) -> bool:
        """Whether the backward pass alone leaves gradients that are not averages yet."""
        return self.world_size > 1 and type(self).after_backward is not Strategy.after_backward

    @property
    def optimizer_state_share(self) -> float:
        """The part of the optimizer's state that one rank holds, about."""
        return 1.0

    @property
    def gradient_share(self) -> float:
        """The part of the gradients that one rank holds after the backward pass, about."""
        return 1.0

    @property
    def parameter_share(self) -> float:
        """The part of the parameters that one rank holds between steps, about."""
        return 1.0

    @property
    def gradient_buffers(self) -> float:
        """Buffers that hold gradients from the start and between steps, over all gradients."""
        return 0.0

    @property
    def loose_gradients(self) -> float:
        """Gradients that lie outside such buffers at the end of backward, over all gradients."""
        return 0.0 if self.gradient_buffers else self.gradient_share

    @property
    def traffic(self) -> dict[str, float]:
        """How often a step moves all gradients or all parameters, by collective operation."""
        if self.world_size == 1:
            return {}
        if self.parameter_share < 1:
            # Parameters for the forward pass and again for the backward pass.
            return {"all_gather": 2.0, "reduce_scatter": 1.0}
        if self.optimizer_state_share < 1:
            return {"all_gather": 1.0, "reduce_scatter": 1.0}
        return {"all_reduce": 1.0}

    def optimizer(
        self, params: Iterable[nn.Parameter], cls: type[Optimizer], **kwargs: Any
    ) -> Optimizer:
        """Make the optimizer over this rank's parameters."""
        return cls(params, **kwargs)
