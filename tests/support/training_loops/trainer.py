"""The containers, and who trains one: what every loop has in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_training import WIDTH, Plain, batches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.data import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlappedDDP,
    Zero1,
    Zero2,
)

Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]


Weights = dict[str, Tensor]


class Exits(Plain):
    """A batch whose first number is negative leaves after the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        depth = 3 if x[0, 0] > 0 else 1
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x)) * self.scale
        return x


def ddp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        module, process_group=group, find_unused_parameters=isinstance(module, Exits)
    )


def fully_shard(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    from torch.distributed.fsdp import fully_shard as shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in getattr(module, "layers", ()):
        shard(layer, mesh=mesh)
    return shard(module, mesh=mesh)


def small_buckets(kind: Any, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return kind(module, 300 / 2**20, group=group)


def fsdp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return FSDP(module, replicate_below=WIDTH + 1, group=group)


def by_hand(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The module itself, whose gradients :class:`Trainer` averages: what all must agree with."""
    return module


CONTAINERS: dict[str, Wrap] = {
    "NaiveDDP": lambda m, g: NaiveDDP(m, group=g),
    "FlatDDP": lambda m, g: FlatDDP(m, group=g),
    "OverlappedDDP": lambda m, g: OverlappedDDP(m, group=g),
    "BucketedDDP": partial(small_buckets, BucketedDDP),
    "Zero1": partial(small_buckets, Zero1),
    "Zero2": partial(small_buckets, Zero2),
    "FSDP": fsdp,
    "DDP": ddp,
    "fully_shard": fully_shard,
    "by hand": by_hand,
}


PEERS = ("DDP", "fully_shard")


@dataclass(kw_only=True, slots=True)
class Trainer:
    """One container's way to do what every loop does."""

    wrap: Wrap
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def model(self, kind: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(100)
        return self.wrap(kind(), self.group)

    def average(self, *models: nn.Module) -> None:
        for model in models:
            if hasattr(model, "finish_gradient_synchronization"):
                model.finish_gradient_synchronization()
            elif self.wrap is by_hand:
                for parameter in model.parameters():
                    gradient = parameter.grad
                    if gradient is None and parameter.requires_grad:
                        gradient = torch.zeros_like(parameter)
                    if gradient is not None:
                        dist.all_reduce(gradient, group=self.group)
                        parameter.grad = gradient / self.group.size()

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()

    def clip(self, model: nn.Module, max_norm: float) -> None:
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(max_norm)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def sgd(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def batches(self) -> Iterable[Tensor]:
        return batches(self.rank, self.group.size())

    def weights(self, model: nn.Module) -> Weights:
        state = model.state_dict()
        wholes = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
        return {n.removeprefix("module."): v.detach().clone() for n, v in wholes.items()}

    def step(self, model: nn.Module, batch: Tensor, *optimizers: torch.optim.Optimizer) -> None:
        """The plain step, by optimizers of one's own."""
        descend(model, batch)
        self.average(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def steps(
        self,
        model: nn.Module,
        backward: Callable[[nn.Module, Tensor], None],
        after: Callable[[int], None] = lambda step: None,
    ) -> Weights:
        """Train with gradients that ``backward`` makes; ``after`` runs between them and a step."""
        optimizer = self.sgd(model.parameters())
        for step, batch in enumerate(self.batches()):
            backward(model, batch)
            self.average(model)
            after(step)
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
        return self.weights(model)


LOOPS: dict[str, Callable[[Trainer], Weights]] = {}


def loop(name: str) -> Callable[[Callable[[Trainer], Weights]], Callable[[Trainer], Weights]]:
    def add(function: Callable[[Trainer], Weights]) -> Callable[[Trainer], Weights]:
        LOOPS[name] = function
        return function

    return add


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def descend(model: nn.Module, batch: Tensor) -> None:
    loss_of(model, batch).backward()


def inner(model: nn.Module) -> nn.Module:
    """The module in a container; ``fully_shard`` and one process have no other."""
    return getattr(model, "module", model)
