"""What a strategy is: a way to train one model on many devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.registry import Registry, joined_later

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist
    from torch import nn
    from torch.amp import GradScaler
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

STRATEGIES: Registry[type[Strategy]] = Registry(
    "parallel", decorator="strategy", packages=("parallel.strategies",)
)

strategy = STRATEGIES.register

AXES_BY_NAME = {
    "tp": "tp",
    "tensor_parallel": "tp",
    "cp": "cp",
    "context_parallel": "cp",
}
"""What might be taken for a choice of ``parallel=`` and is an axis that every choice has."""


@dataclass(kw_only=True, slots=True)
class Strategy:
    """A choice of ``parallel=``; the defaults do nothing, which is right for one device."""

    name: str
    dp: int = 1
    """Ranks of the data-parallel mesh axis: each trains on its own batch."""
    cp: int = joined_later(1)
    """Ranks of the context-parallel mesh axis: each holds a part of every sequence."""
    tp: int = joined_later(1)
    """Ranks of the tensor-parallel mesh axis: each holds a part of every large weight."""

    peer: ClassVar[str | None] = None
    """Another strategy whose time tables hold this one's against, besides PyTorch's DDP."""

    def __post_init__(self) -> None:
        for axis in ("dp", "cp", "tp"):
            value = getattr(self, axis)
            if value < 1:
                raise ValueError(f"parallel.{axis}={value}: must be at least 1")

    @property
    def axes(self) -> dict[str, int]:
        """Ranks of each mesh axis that has several, the innermost, whose are neighbours, last."""
        axes = {"dp": self.dp, "cp": self.cp, "tp": self.tp}
        return {axis: ranks for axis, ranks in axes.items() if ranks > 1}

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights: gradients are averages over them."""
        return self.dp * self.cp

    def data_rank(self, rank: int) -> int:
        """The number of a rank of the world among those that hold the same weights."""
        return rank // self.tp

    # Groups and meshes are made once a world; all its ranks ask for them together.

    def cp_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's sequences, and hold the same weights."""
        from parallel.mesh import cp_group

        return cp_group(self.dp, self.cp, self.tp)

    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same weights as this one; None for one rank alone."""
        if self.world_size == 1:
            return None
        from parallel.mesh import data_group

        return data_group(self.dp, self.cp, self.tp)

    def data_mesh(self) -> DeviceMesh:
        """:meth:`data_group` as a mesh of one axis, for what takes no group."""
        from parallel.mesh import data_mesh

        return data_mesh(self.dp, self.cp, self.tp)

    def tp_mesh(self) -> DeviceMesh:
        """The ranks that share this rank's weights, as a mesh of one axis."""
        from parallel.mesh import device_mesh

        return device_mesh(self.dp, self.cp, self.tp)["tp"]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare the model, already on its device, for training; called once.

        With ``tp`` above 1 it has been split (:mod:`parallel.tensor`): its parameters
        are plain tensors, this rank's parts, and equal over :meth:`data_group` alone.
        """
        return model

    def after_backward(self, model: nn.Module) -> None:
        """Called after every backward pass, before the optimizer, with the wrapped model.

        From here on gradients are averages over :meth:`data_group`. Over the axis tp there is
        nothing to average: a part of a weight is on one of its ranks, and the backward pass
        has summed the gradients of what all of them hold.
        """

    def finish(self, model: nn.Module) -> None:
        """Called after the last step, with the wrapped model: wait for what is on its way.

        PyTorch keeps the tensors of a transfer that nobody waits for, and with them the model,
        until the group's next one.
        """

    @property
    def synchronizes_after_backward(self) -> bool:
        """Whether the backward pass alone leaves gradients that are not averages yet."""
        return self.data_ranks > 1 and type(self).after_backward is not Strategy.after_backward

    @property
    def optimizer_state_share(self) -> float:
        """The part of the optimizer's state of its own parameters that one rank holds, about."""
        return 1.0

    @property
    def gradient_share(self) -> float:
        """The part of the gradients that one rank holds after the backward pass, about."""
        return 1.0

    @property
    def parameter_share(self) -> float:
        """The part of the parameters that one rank holds between steps, about."""
        return 1.0

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        """Buffers that hold gradients from the start and between steps, over all gradients.

        Args:
            sizes: bytes of each parameter's gradient, in the order of the module.
        """
        return 0.0

    def loose_gradients(self, sizes: Sequence[float]) -> float:
        """Gradients that lie outside such buffers at the end of backward, over all gradients."""
        return max(0.0, self.gradient_share - self.gradient_buffers(sizes))

    @property
    def traffic(self) -> dict[str, float]:
        """How often a step moves all gradients or all parameters, by collective operation."""
        if self.data_ranks == 1:
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

    @property
    def gradients_differ(self) -> bool:
        """Whether an overflow in float16 may be in the gradients of one rank alone."""
        return self.tp > 1

    def grad_scaler(self, device: str, *, enabled: bool) -> GradScaler:
        """What scales the loss, where float16 gradients need it: all ranks take a step, or none."""
        import torch

        if not self.gradients_differ:
            return torch.amp.GradScaler(device, enabled=enabled)
        from parallel.data import AgreeingGradScaler

        return AgreeingGradScaler(device, enabled=enabled)
