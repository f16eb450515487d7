"""Loops whose passes are unusual: several before a step, checkpointed, compiled, failing."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from data_parallel_training import WIDTH, Plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training_loops.trainer import Exits, Trainer, Weights, descend, loop, loss_of


@loop("GAN, two containers")
def gan(trainer: Trainer) -> Weights:
    maker, judge = trainer.model(Plain), trainer.model(Plain)
    optimizers = [trainer.sgd(model.parameters()) for model in (maker, judge)]
    for batch in trainer.batches():
        made = maker(batch)
        judge.requires_grad_(False)
        judge(made).square().mean().backward()
        trainer.average(maker)
        optimizers[0].step()
        maker.zero_grad()
        judge.requires_grad_(True)
        (judge(made.detach()).mean() - judge(batch).mean()).backward()
        trainer.average(judge)
        optimizers[1].step()
        judge.zero_grad()
    return {
        f"{who}.{name}": value
        for who, model in (("maker", maker), ("judge", judge))
        for name, value in trainer.weights(model).items()
    }


@loop("DPO: two forward passes, one backward")
def dpo(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        chosen, rejected = batch.chunk(2)
        nn.functional.softplus(model(rejected).sum() - model(chosen).sum()).backward()

    return trainer.steps(trainer.model(Plain), backward)


@loop("reference logits without a graph in between")
def reference(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        outputs = model(batch)
        with torch.no_grad():
            target = model(batch * 0.5)
        (outputs - target).square().mean().backward()

    return trainer.steps(trainer.model(Plain), backward)


class Albert(Plain):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = torch.tanh(layer(x)) * self.scale
        return x


@loop("ALBERT: layers run again")
def albert(trainer: Trainer) -> Weights:
    return trainer.steps(trainer.model(Albert), descend)


@loop("early exit, by another depth on each rank")
def early_exit(trainer: Trainer) -> Weights:
    return trainer.steps(trainer.model(Exits), descend)


class Checkpointed(Plain):
    REENTRANT = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.REENTRANT)) * self.scale
        return x


class Reentrant(Checkpointed):
    REENTRANT = True


@loop("checkpointing")
def checkpointing(trainer: Trainer) -> Weights:
    return trainer.steps(trainer.model(Checkpointed), descend)


@loop("checkpointing, reentrant")
def reentrant(trainer: Trainer) -> Weights:
    return trainer.steps(trainer.model(Reentrant), descend)


@loop("evaluation in between")
def evaluation(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        model.train()

    return trainer.steps(model, descend, evaluate)


@loop("evaluation in `inference_mode()`")
def inference(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        with torch.inference_mode():
            model(batch)
        descend(model, batch)

    return trainer.steps(trainer.model(Plain), backward)


@loop("a loss that is only looked at, before a step")
def looked_at(trainer: Trainer) -> Weights:
    """A validation loss with a graph that nobody goes back through."""
    model = trainer.model(Plain)
    losses = []

    def look(step: int) -> None:
        losses.append(loss_of(model, torch.ones(2, WIDTH)).detach())

    weights = trainer.steps(model, descend, look)
    return {**weights, "losses": torch.stack(losses)}


@loop("an exception in a forward pass")
def exception(trainer: Trainer) -> Weights:
    class Fragile(Plain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            if torch.isnan(x).any():
                raise ArithmeticError("not a number")
            return self.layers[2](self.layers[1](x))

    def backward(model: nn.Module, batch: Tensor) -> None:
        with contextlib.suppress(ArithmeticError):
            descend(model, batch * float("nan"))
        descend(model, batch)

    return trainer.steps(trainer.model(Fragile), backward)


class Failing(torch.autograd.Function):
    """An error in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("not a number")


class FailsOnce(Plain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.layers[0](x)
        if self.calls == 2:
            x = Failing.apply(x)
        return self.layers[2](self.layers[1](x))


@loop("an exception in a backward pass, whose gradients are dropped")
def exception_behind(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        try:
            descend(model, batch)
        except ArithmeticError:
            trainer.average(model)
            model.zero_grad()
            descend(model, batch)

    return trainer.steps(trainer.model(FailsOnce), backward)


@loop("compiled blocks (`torch.compile`)")
def compiled(trainer: Trainer) -> Weights:
    def make() -> nn.Module:
        module = Plain()
        for layer in module.layers:
            layer.compile(backend="eager")
        return module

    return trainer.steps(trainer.model(make), descend)


@loop("compiled containers (`torch.compile`)")
def compiled_container(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    whole = torch.compile(model, backend="aot_eager")

    def backward(_: nn.Module, batch: Tensor) -> None:
        descend(whole, batch)

    return trainer.steps(model, backward)


@loop("one graph twice (`retain_graph`)")
def retained(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        loss = loss_of(model, batch)
        with trainer.no_sync(model):
            loss.backward(retain_graph=True)
        loss.backward()

    return trainer.steps(trainer.model(Plain), backward)


@loop("gradient penalty (`create_graph`)")
def penalty(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()

    return trainer.steps(trainer.model(Plain), backward)
