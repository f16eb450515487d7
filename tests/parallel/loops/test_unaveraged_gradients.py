"""Optimizer steps on gradients that ranks have not averaged raise; nothing else does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    IN_PARTS,
    OWN,
    WIDTH,
    Plain,
    Unused,
    Wrap,
    assert_equal,
    batches,
    bucketed,
    naive,
)
from ranks import on_ranks
from sharded_steps import finish, loss_of
from torch import nn

from parallel.data import AgreeingGradScaler, ShardedOptimizer, optimizer_of_shards

Make = Callable[..., torch.optim.Optimizer]

EVERY = [*OWN, *IN_PARTS]


def sgd(params: Any, group: dist.ProcessGroup) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def of_shards(params: Any, group: dist.ProcessGroup) -> torch.optim.Optimizer:
    return optimizer_of_shards(params, torch.optim.SGD, lr=0.05)


def sharded_optimizer(params: Any, group: dist.ProcessGroup) -> torch.optim.Optimizer:
    return ShardedOptimizer(params, torch.optim.SGD, process_group=group, lr=0.05)


def forgets_to_finish(group: dist.ProcessGroup, wrap: Wrap, make: Make, waits: bool) -> str:
    """The error of a step; before it nothing has changed."""
    torch.manual_seed(1)
    model = wrap(Plain(), group)
    optimizer = make(model.parameters(), group)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
        loss_of(model, torch.ones(2, WIDTH) * (1 + dist.get_rank(group))).backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    finish(model)
    assert_equal(dict(model.state_dict()), before, rtol=0, atol=0)
    optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("wrap", "make"),
    [
        *((wrap, sgd) for wrap in EVERY),
        *((wrap, of_shards) for wrap in IN_PARTS),
        *((wrap, sharded_optimizer) for wrap in OWN),
    ],
)
def test_a_step_without_averages_raises_on_all_ranks(wrap: Wrap, make: Make, waits: bool) -> None:
    for message in on_ranks(2, forgets_to_finish, wrap, make, waits):
        assert message.startswith("optimizer.step(): the gradient of layers.")
        assert "finish_gradient_synchronization()" in message
        assert "\n" not in message


def honest(group: dist.ProcessGroup, wrap: Wrap) -> None:
    """Loops that are right: accumulation, evaluation, passes that are skipped or thrown away."""
    rank = dist.get_rank(group)
    torch.manual_seed(1)
    model = wrap(Unused(), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = AgreeingGradScaler("cpu", group=group, init_scale=2.0)
    for step, batch in enumerate(batches(rank, group.size())):
        first, *more = batch.chunk(3)
        for part in more:
            with model.no_sync():  # type: ignore[operator]
                scaler.scale(loss_of(model, part)).backward()
        scaler.scale(loss_of(model, first)).backward()
        finish(model)
        with torch.no_grad():
            model(batch)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():  # type: ignore[operator]
            loss_of(model, batch).backward()
        # A loss that is not used after all.
        model.zero_grad()
        optimizer.step()
        loss = loss_of(model, batch)
        if rank == 0:
            loss.backward()
        # The other rank has no loss in this step.
        finish(model)
        optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("wrap", EVERY)
def test_no_false_alarms(wrap: Wrap) -> None:
    on_ranks(2, honest, wrap)


def adversaries(group: dist.ProcessGroup, wrap: Wrap) -> None:
    """The generator's backward pass leaves gradients in the discriminator, which are thrown away.

    One optimizer must not be blamed for another's parameters.
    """
    torch.manual_seed(1)
    players = {"one": wrap(nn.Linear(4, 4), group), "two": wrap(nn.Linear(4, 1), group)}
    optimizers = {n: torch.optim.SGD(p.parameters(), lr=0.1) for n, p in players.items()}
    for _ in range(2):
        players["two"](players["one"](torch.randn(3, 4))).mean().backward()
        finish(players["one"])
        optimizers["one"].step()
        players["two"].zero_grad()
        players["two"](players["one"](torch.randn(3, 4)).detach()).mean().backward()
        finish(players["two"])
        optimizers["two"].step()
        players["two"].zero_grad()
        players["one"].zero_grad()


def test_another_containers_gradients_are_not_this_optimizers() -> None:
    on_ranks(2, adversaries, naive)


def gone(group: dist.ProcessGroup) -> None:
    """A container that is no longer there has nothing to say."""
    module = Plain()
    model = bucketed(module, group)
    loss_of(model, torch.ones(2, WIDTH)).backward()
    finish(model)
    del model
    loss_of(module, torch.ones(2, WIDTH)).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def test_modules_outlive_their_containers() -> None:
    on_ranks(2, gone)
