"""Loops that change, replace, copy or read weights beside the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from data_parallel_training import WIDTH, Plain
from torch import Tensor, nn

from parallel.data import (
    optimizer_of_shards,
)
from training_loops.trainer import (
    Trainer,
    Weights,
    by_hand,
    descend,
    fully_shard,
    inner,
    loop,
    loss_of,
)


class HalfFrozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


@loop("gradual unfreezing")
def unfreezing(trainer: Trainer) -> Weights:
    model = trainer.model(HalfFrozen)

    def thaw(step: int) -> None:
        if step == 1:
            # Gradients of this step are averaged already.
            for name, parameter in model.named_parameters():
                if "layers.0" in name:
                    parameter.requires_grad_(True)

    return trainer.steps(model, descend, thaw)


@loop("moving average of weights")
def moving_average(trainer: Trainer) -> Weights:
    """Over ``named_parameters()``: an average of parts is a part of the average."""
    model = trainer.model(Plain)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}

    def backward(model: nn.Module, batch: Tensor) -> None:
        descend(model, batch)
        for name, parameter in model.named_parameters():
            averages[name].lerp_(parameter.detach(), 0.1)

    trainer.steps(model, backward)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(averages[name])
    return trainer.weights(model)


@loop("averaged weights put in for a validation loss, and taken out")
def swapped(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    averages = [p.detach().clone() for p in model.parameters()]
    optimizer = trainer.sgd(model.parameters())
    losses = []

    def put(values: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        losses.append(loss_of(model, torch.ones(2, WIDTH)).detach())

    for batch in trainer.batches():
        trainer.step(model, batch, optimizer)
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)
        trained = [p.detach().clone() for p in model.parameters()]
        put(averages)
        put(trained)
    return {**trainer.weights(model), "losses": torch.stack(losses)}


@loop("weights clamped after a step (WGAN)")
def clamped(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    params = list(model.parameters())
    kind = optimizer_of_shards if any(hasattr(p, "origin") for p in params) else _plain
    optimizer = kind(params, torch.optim.SGD, lr=0.05)
    for batch in trainer.batches():
        descend(model, batch)
        trainer.average(model)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        model.zero_grad()
    return trainer.weights(model)


def _plain(params: Any, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    return kind(params, **options)


@loop("weights changed between passes in `no_sync()`")
def changed_in_between(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        with trainer.no_sync(model):
            for part in batch.chunk(2):
                descend(model, part)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.9)
        descend(model, batch)

    return trainer.steps(trainer.model(Plain), backward)


@loop("the module's own `state_dict()`")
def state_of_module(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    trainer.steps(model, descend)
    state = inner(model).state_dict()
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}


@loop("a deep copy of the container")
def deep_copy(trainer: Trainer) -> Weights:
    return trainer.steps(copy.deepcopy(trainer.model(Plain)), descend)


@loop("a container of blocks that have containers")
def nested(trainer: Trainer) -> Weights:
    torch.manual_seed(100)
    module = Plain()
    if trainer.wrap not in (by_hand, fully_shard):
        for number, layer in enumerate(module.layers):
            module.layers[number] = trainer.wrap(layer, trainer.group)
    weights = trainer.steps(trainer.wrap(module, trainer.group), descend)
    return {name.replace(".module", ""): value for name, value in weights.items()}


@loop("a module converted in its container")
def converted(trainer: Trainer) -> Weights:
    model = trainer.model(Plain).double()

    def backward(model: nn.Module, batch: Tensor) -> None:
        model(batch.double()).square().mean().backward()

    return trainer.steps(model, backward)


@loop("a layer replaced in the container")
def replaced(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    torch.manual_seed(5)
    inner(model).layers[2] = nn.Linear(WIDTH, WIDTH)
    return trainer.steps(model, descend)
