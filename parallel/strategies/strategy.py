"""The interface of a strategy, a way to train one model on many devices, and their registry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from kernels.registry import Registry, joined_later
from parallel import mesh
from parallel.data import grad_scaler

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
"""Mesh axes, which every strategy has, by the names under which ``parallel=`` may be given them."""


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
    improves_on: ClassVar[str | None] = None
    """The simpler strategy that it takes one step further; figures show them in this order."""
    captures: ClassVar[bool] = False
    """Whether a CUDA graph may hold the backward pass on several ranks, with what they exchange."""
    casts_shares: ClassVar[bool] = False
    """Whether a rank casts its own share of the weights for autocast, rather than all of them."""

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
        return mesh.cp_group(self.dp, self.cp, self.tp)

    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same weights as this one; None for one rank alone."""
        if self.world_size == 1:
            return None
        return mesh.data_group(self.dp, self.cp, self.tp)

    def data_mesh(self) -> dist.device_mesh.DeviceMesh:
        """:meth:`data_group` as a mesh of one axis, for functions that take no group."""
        return mesh.data_mesh(self.dp, self.cp, self.tp)

    def tp_mesh(self) -> dist.device_mesh.DeviceMesh:
        """The ranks that share this rank's weights, as a mesh of one axis."""
        return mesh.device_mesh(self.dp, self.cp, self.tp)["tp"]

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Prepare the model, already on its device, for training; called once.

        With ``tp`` above 1 it has been split (:mod:`parallel.tensor`): its parameters
        are plain tensors, this rank's parts, and equal over :meth:`data_group` alone.
        """
        return model

    def after_backward(self, model: torch.nn.Module) -> None:
        """Average gradients over :meth:`data_group`; called after every backward pass.

        With the wrapped model, before the optimizer's step. Over the axis tp there is nothing to
        average: a shard of a weight is on one of its ranks, and the backward pass has summed the
        gradients of weights that all of them hold.
        """

    def finish(self, model: torch.nn.Module) -> None:
        """Wait for transfers that are under way; called with the wrapped model after the last step.

        PyTorch keeps the tensors of a transfer that nobody waits for, and with them the model,
        until the group's next transfer.
        """

    @property
    def synchronizes_after_backward(self) -> bool:
        """Whether the backward pass alone leaves gradients that are not averages yet."""
        return self.data_ranks > 1 and type(self).after_backward is not Strategy.after_backward

    @property
    def optimizer_state_share(self) -> float:
        """Fraction of the optimizer's state that one rank holds, about."""
        return 1.0

    @property
    def gradient_share(self) -> float:
        """Fraction of the gradients that one rank holds after the backward pass, about."""
        return 1.0

    @property
    def parameter_share(self) -> float:
        """Fraction of the parameters that one rank holds between steps, about."""
        return 1.0

    def gradient_buffers(self, sizes: Sequence[float]) -> float:
        """Fraction of the gradients that lie in buffers, from the start and between steps.

        Args:
            sizes: bytes of each parameter's gradient, in the order of the module.
        """
        return 0.0

    def loose_gradients(self, sizes: Sequence[float]) -> float:
        """Fraction of the gradients that lie outside such buffers at the end of backward."""
        return max(0.0, self.gradient_share - self.gradient_buffers(sizes))

    @property
    def traffic(self) -> dict[str, float]:
        """How many times a step moves all gradients or all parameters, by collective operation."""
        if self.data_ranks == 1:
            return {}
        if self.parameter_share < 1:
            # Parameters for the forward pass and again for the backward pass.
            return {"all_gather": 2.0, "reduce_scatter": 1.0}
        if self.optimizer_state_share < 1:
            return {"all_gather": 1.0, "reduce_scatter": 1.0}
        return {"all_reduce": 1.0}

    def predicted_ranks(self, collective: str) -> tuple[int, int]:
        """Ranks that run a collective operation of ``traffic`` together, and how far apart.

        They are among the ranks of :meth:`data_group`; neighbours are 1 apart.
        """
        return self.data_ranks, 1

    def optimizer(
        self, params: Iterable[torch.nn.Parameter], cls: type[torch.optim.Optimizer], **kwargs: Any
    ) -> torch.optim.Optimizer:
        """Make the optimizer over this rank's parameters."""
        return cls(params, **kwargs)

    @property
    def exchange_dtype(self) -> str | None:
        """The dtype that it rounds weights and gradients to, where that is a choice of its own."""
        return None

    def in_units_of(self, num_bytes: int) -> Strategy:
        """The same in smaller units, about so many bytes of gradients, to try it on a small model.

        A unit is what one transfer moves: a bucket, or a gathered part of the weights.
        """
        return self

    @property
    def gradients_differ(self) -> bool:
        """Whether an overflow in float16 may be in the gradients of one rank alone."""
        return self.tp > 1

    def grad_scaler(self, device: str, *, enabled: bool) -> torch.amp.GradScaler:
        """Scales the loss for float16 gradients, so that all ranks take a step or none does."""
        if not self.gradients_differ:
            return torch.amp.GradScaler(device, enabled=enabled)
        return grad_scaler.AgreeingGradScaler(device, enabled=enabled)
