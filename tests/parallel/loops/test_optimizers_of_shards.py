"""foreach and fused optimizers, parameter groups and schedules over shards, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    WIDTH,
    Large,
    Strided,
    Wrap,
    assert_equal,
    batches,
    zero_2,
)
from ranks import on_ranks
from sharded_steps import finish, loss_of, sharded
from torch import Tensor, nn

from parallel.data import optimizer_of_shards

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    (torch.optim.NAdam, {"foreach": True}),
    (torch.optim.RMSprop, {"foreach": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {"fused": True}),
]


class Forms(Strided, Large):
    """A convolution laid out channels last, and a scalar, which only one rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def train(
    model: nn.Module, kind: type[torch.optim.Optimizer], options: dict[str, Any], rank: int, of: int
) -> dict[str, Tensor]:
    """With two groups, a warm-up and a schedule; saved and loaded in the middle."""
    named = list(model.named_parameters())

    def make() -> tuple[torch.optim.Optimizer, Any]:
        groups = [
            {"params": [p for name, p in named if name.endswith("weight")]},
            {"params": [p for name, p in named if not name.endswith("weight")], "lr": 0.005},
        ]
        optimizer = optimizer_of_shards(groups, kind, lr=0.02, **options)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 0.5**n])
        return optimizer, torch.optim.lr_scheduler.ChainedScheduler([warm_up, decay], optimizer)

    optimizer, schedule = make()
    for step, batch in enumerate(batches(rank, of)):
        if step == 2:
            states = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = make()
            optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        loss_of(model, batch).backward()
        finish(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    rates = {f"rate {n}": torch.tensor(g["lr"]) for n, g in enumerate(optimizer.param_groups)}
    state = model.state_dict()
    return {**{n.removeprefix("module."): v.clone() for n, v in state.items()}, **rates}


def train_on_rank(
    group: dist.ProcessGroup,
    wrap: Wrap,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
) -> dict[str, Tensor]:
    torch.manual_seed(100)
    return train(wrap(Forms(), group), kind, options, dist.get_rank(group), group.size())


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_as_in_one_process(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    torch.manual_seed(100)
    wanted = train(Forms(), kind, options, 0, 1)
    for wrap, num_ranks in ((sharded, 3), (zero_2, 2)):
        for found in on_ranks(num_ranks, train_on_rank, wrap, kind, options):
            assert_equal(found, wanted, rtol=2e-4, atol=2e-5)


def state_over_the_module(
    group: dist.ProcessGroup, wrap: Wrap
) -> list[tuple[tuple[int, ...], ...]]:
    """Shapes of the state of an optimizer that has the module's own parameters."""
    model = wrap(Forms(), group)
    optimizer = optimizer_of_shards(model.module.parameters(), torch.optim.AdamW)
    loss_of(model, next(iter(batches(0, 1)))).backward()
    finish(model)
    optimizer.step()
    found = []
    for _ in range(2):
        state = optimizer.state_dict()["state"]
        found.append([state[number]["exp_avg"].shape for number in sorted(state)])
        # The module's parameters are whole from here on.
        loss_of(model, torch.ones(2, WIDTH))
    return found


def test_state_over_the_modules_own_parameters_is_whole() -> None:
    wanted = [p.shape for p in Forms().parameters()]
    for wrap in (sharded, zero_2):
        for shapes in on_ranks(2, state_over_the_module, wrap):
            assert shapes == [wanted, wanted]


def step_before_wrapping(group: dist.ProcessGroup, wrap: Wrap) -> str:
    module = Forms()
    optimizer = torch.optim.Adafactor(module.parameters())
    model = wrap(module, group)
    loss_of(model, next(iter(batches(0, 1)))).backward()
    finish(model)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_an_optimizer_of_matrices_made_before_wrapping_is_refused() -> None:
    for wrap in (sharded, zero_2):
        for message in on_ranks(2, step_before_wrapping, wrap):
            assert message.startswith("optimizer.step(): Adafactor does not update each element")


def parts_added_later(group: dist.ProcessGroup, wrap: Wrap) -> str:
    """The optimizer has stepped without them, as in gradual unfreezing."""
    model = wrap(Forms(), group)
    first, *rest = model.parameters()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([other])
    optimizer.step()
    assert optimizer.state_dict()["state"]
    optimizer.add_param_group({"params": [first, *rest]})
    loss_of(model, next(iter(batches(0, 1)))).backward()
    finish(model)
    optimizer.step()
    with pytest.raises(RuntimeError) as error:
        optimizer.state_dict()
    return str(error.value)


def test_state_of_shards_alone_is_refused() -> None:
    for wrap in (sharded, zero_2):
        for message in on_ranks(2, parts_added_later, wrap):
            assert message.startswith("state_dict() of the optimizer: its parameters are this rank")
