"""Loops that do something to gradients: accumulate, clip, scale, hook or forget them."""

from __future__ import annotations

import torch
from data_parallel_training import Plain
from torch import Tensor, nn

from parallel.data import (
    AgreeingGradScaler,
)
from training_loops.trainer import Trainer, Weights, by_hand, descend, inner, loop, loss_of


@loop("plain")
def plain(trainer: Trainer) -> Weights:
    return trainer.steps(trainer.model(Plain), descend)


@loop("accumulation in `no_sync()`")
def accumulation(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        first, second = batch.chunk(2)
        with trainer.no_sync(model):
            descend(model, first)
        descend(model, second)

    return trainer.steps(trainer.model(Plain), backward)


@loop("clipping by the norm")
def clipping(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    return trainer.steps(model, descend, lambda step: trainer.clip(model, 0.01))


@loop("PyTorch's clipping function")
def plain_clipping(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    return trainer.steps(model, descend, clip)


@loop("clipping by a norm written by hand")
def clipping_by_hand(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)

    def clip(step: int) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = sum((g**2).sum() for g in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.01 / float(norm)))

    return trainer.steps(model, descend, clip)


@loop("parameters in bfloat16")
def bfloat16(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        descend(model, batch.bfloat16())

    return trainer.steps(trainer.model(lambda: Plain().bfloat16()), backward)


@loop("GradScaler, an infinity on one rank")
def scaler(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    optimizer = trainer.sgd(model.parameters())
    scaler = AgreeingGradScaler("cpu", init_scale=4.0, growth_interval=99, group=trainer.group)
    for step, batch in enumerate(trainer.batches()):
        lost = step == 1 and trainer.rank == 0
        scaler.scale(loss_of(model, batch * (float("inf") if lost else 1.0))).backward()
        trainer.average(model)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    return {**trainer.weights(model), "scale": torch.tensor(scaler.get_scale())}


@loop("PyTorch's own GradScaler, an infinity on one rank")
def own_scaler(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    optimizer = trainer.sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=99)
    for step, batch in enumerate(trainer.batches()):
        loss = loss_of(model, batch)
        if step == 1 and trainer.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        trainer.average(model)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    return trainer.weights(model)


@loop("hooks on parameters")
def hooks(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.1)
    return trainer.steps(model, descend)


@loop("averaging forgotten")
def forgotten(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    optimizer = trainer.sgd(model.parameters())
    for batch in trainer.batches():
        descend(model, batch)
        if trainer.wrap is by_hand:
            trainer.average(model)
        optimizer.step()
        optimizer.zero_grad()
    return trainer.weights(model)


@loop("gradients zeroed in the module, not the container")
def zeroed_inside(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    optimizer = trainer.sgd(model.parameters())
    for batch in trainer.batches():
        inner(model).zero_grad()
        descend(model, batch)
        trainer.average(model)
        optimizer.step()
    return trainer.weights(model)
