"""Loops that depend on the optimizer: its kind, when it is made, what it keeps."""

from __future__ import annotations

from typing import Any

import torch
from data_parallel_training import Plain

from parallel.data import (
    ShardedOptimizer,
)
from training_loops.trainer import Trainer, Weights, loop


@loop("fused AdamW, two learning rates, a schedule")
def fused(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if "weight" in name]},
        {"params": [p for name, p in named if "weight" not in name], "lr": 0.002},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for batch in trainer.batches():
        trainer.step(model, batch, optimizer)
        schedule.step()
    return trainer.weights(model)


@loop("Muon for matrices, AdamW for the rest")
def muon(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    named = list(model.named_parameters())
    optimizers: list[torch.optim.Optimizer] = []
    kinds: list[type[torch.optim.Optimizer]] = [torch.optim.Muon, torch.optim.AdamW]
    for kind, word in zip(kinds, ("weight", "bias"), strict=True):
        members = [p for name, p in named if word in name]
        if hasattr(model, "finish_gradient_synchronization"):
            owners = ShardedOptimizer(members, kind, process_group=trainer.group, lr=0.01)
            optimizers.append(owners)
        else:
            optimizers.append(kind(members, lr=0.01))  # type: ignore[call-arg]
    for batch in trainer.batches():
        trainer.step(model, batch, *optimizers)
    return trainer.weights(model)


@loop("an optimizer made before the container")
def optimizer_before(trainer: Trainer) -> Weights:
    torch.manual_seed(100)
    module = Plain()
    optimizer = trainer.sgd(module.parameters())
    model = trainer.wrap(module, trainer.group)
    for batch in trainer.batches():
        trainer.step(model, batch, optimizer)
    return trainer.weights(model)


@loop("`state_dict()` of a plain AdamW")
def state_of_optimizer(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in trainer.batches():
        trainer.step(model, batch, optimizer)
    state = optimizer.state_dict()["state"]
    averages = {f"exp_avg {number}": values["exp_avg"] for number, values in state.items()}
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in averages.items()}
