"""Loops that users write around a container, each as a function of who trains."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_training import WIDTH, Plain, batches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from parallel.checkpoints import load_checkpoint, save_checkpoint
from parallel.data import (
    FSDP,
    AgreeingGradScaler,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlappedDDP,
    ShardedOptimizer,
    Zero1,
    Zero2,
    optimizer_of_shards,
)

Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]

Weights = dict[str, Tensor]


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


class Exits(Plain):
    """A batch whose first number is negative leaves after the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        depth = 3 if x[0, 0] > 0 else 1
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x)) * self.scale
        return x


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


@loop("saving, and loading into a new model")
def saving(trainer: Trainer) -> Weights:
    first = trainer.model(Plain)
    trainer.steps(first, descend)
    state = copy.deepcopy(first.state_dict())
    second = trainer.model(Plain)
    second.load_state_dict(state)
    return trainer.steps(second, descend)


@loop("evaluation in between")
def evaluation(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        model.train()

    return trainer.steps(model, descend, evaluate)


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
        descend(model, batch)
        trainer.average(model)
        optimizer.step()
        optimizer.zero_grad()
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
        descend(model, batch)
        trainer.average(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return trainer.weights(model)


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


@loop("clipping by a norm written by hand")
def clipping_by_hand(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)

    def clip(step: int) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = sum((g**2).sum() for g in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.01 / float(norm)))

    return trainer.steps(model, descend, clip)


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


def inner(model: nn.Module) -> nn.Module:
    """The module in a container; ``fully_shard`` and one process have no other."""
    return getattr(model, "module", model)


@loop("an optimizer made before the container")
def optimizer_before(trainer: Trainer) -> Weights:
    torch.manual_seed(100)
    module = Plain()
    optimizer = trainer.sgd(module.parameters())
    model = trainer.wrap(module, trainer.group)
    for batch in trainer.batches():
        descend(model, batch)
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


@loop("gradient penalty (`create_graph`)")
def penalty(trainer: Trainer) -> Weights:
    def backward(model: nn.Module, batch: Tensor) -> None:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()

    return trainer.steps(trainer.model(Plain), backward)


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
        descend(model, batch)
        trainer.average(model)
        optimizer.step()
        optimizer.zero_grad()
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)
        trained = [p.detach().clone() for p in model.parameters()]
        put(averages)
        put(trained)
    return {**trainer.weights(model), "losses": torch.stack(losses)}


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


@loop("`state_dict()` of a plain AdamW")
def state_of_optimizer(trainer: Trainer) -> Weights:
    model = trainer.model(Plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in trainer.batches():
        descend(model, batch)
        trainer.average(model)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    averages = {f"exp_avg {number}": values["exp_avg"] for number, values in state.items()}
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in averages.items()}


RESHARDED = "`save_checkpoint` on four ranks, `load_checkpoint` on two and on one"
"""A loop that takes several groups of ranks, and so stands in no function here."""


def save_on_rank(group: dist.ProcessGroup, container: str, folder: Path) -> None:
    """Two steps, and a checkpoint of them."""
    trainer = Trainer(wrap=CONTAINERS[container], group=group)
    model = trainer.model(Plain)
    optimizer = trainer.sgd(model.parameters())
    for batch in list(trainer.batches())[:2]:
        descend(model, batch)
        trainer.average(model)
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, model, optimizer, group=group)


def load_on_rank(group: dist.ProcessGroup, container: str, folder: Path) -> Weights:
    """The steps after a checkpoint, from other weights and with a new optimizer."""
    trainer = Trainer(wrap=CONTAINERS[container], group=group)
    model = trainer.model(Plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = trainer.sgd(model.parameters())
    load_checkpoint(folder, model, optimizer, group=group)
    for batch in list(trainer.batches())[2:]:
        descend(model, batch)
        trainer.average(model)
        optimizer.step()
        optimizer.zero_grad()
    return trainer.weights(model)


def outcome(group: dist.ProcessGroup, container: str, name: str) -> Weights | str:
    """The weights that a loop ends with, or the first line of the error that refuses it."""
    try:
        return LOOPS[name](Trainer(wrap=CONTAINERS[container], group=group))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
