"""FSDP's module shows this rank's shards as its own parameters, with their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    WIDTH,
    Frozen,
    Large,
    Plain,
    Run,
    TwoDtypes,
    assert_equal,
    batches,
    bounds_of,
    expected,
    fsdp,
)
from ranks import on_ranks
from sharded_steps import loss_of
from torch import Tensor, nn

from parallel.data import FSDP


def named_gradients(group: dist.ProcessGroup) -> dict[str, tuple[list[int], Tensor]]:
    """Where each gradient of the module's own parameters lies in the whole one."""
    torch.manual_seed(100)
    model = fsdp(Plain(), group)
    assert all(p.grad is None for p in model.module.parameters())
    loss_of(model, torch.ones(2, WIDTH)).backward()
    model.finish_gradient_synchronization()
    shards = dict(model.named_parameters())
    found = {}
    for name, parameter in model.module.named_parameters():
        shard = shards[f"module.{name}"]
        assert parameter.data_ptr() == shard.data_ptr()
        assert parameter.grad is shard.grad
        origin = shard.origin
        found[name] = ([origin.start, origin.stop], parameter.grad.as_subclass(Tensor).clone())
    return found


def test_gradients_by_name() -> None:
    torch.manual_seed(100)
    module = Plain()
    loss_of(module, torch.ones(2, WIDTH)).backward()
    ranks = on_ranks(2, named_gradients)
    for name, parameter in module.named_parameters():
        whole = parameter.grad.flatten()
        pieces = [found[name] for found in ranks]
        for (start, stop), gradient in pieces:
            torch.testing.assert_close(gradient, whole[start:stop])
        assert {at for (start, stop), _ in pieces for at in range(start, stop)} == set(
            range(whole.numel())
        )


class Stack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def train(
    group: dist.ProcessGroup, kind: type[nn.Module], dtype: torch.dtype | None, to_none: bool
) -> dict[str, Tensor]:
    """With an optimizer over the module's own parameters, and an evaluation before each step."""
    torch.manual_seed(100)
    model = FSDP(kind(), dtype, replicate_below=WIDTH + 1, group=group)
    own = [p for p in model.module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.05, momentum=0.9)
    for batch in batches(dist.get_rank(group), group.size()):
        loss_of(model, batch).backward()
        model.finish_gradient_synchronization()
        with torch.no_grad():
            model(batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Plain, None), (Stack, torch.bfloat16), (Frozen, None), (TwoDtypes, None), (Large, None)],
)
@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimizer_of_the_modules_parameters(
    kind: type[nn.Module], dtype: torch.dtype | None, to_none: bool
) -> None:
    bounds = {"rtol": 2e-2, "atol": 2e-2} if dtype else bounds_of(kind, Run())
    for found in on_ranks(2, train, kind, dtype, to_none):
        assert_equal(found, expected(kind, Run()), **bounds)


def forgets(group: dist.ProcessGroup) -> str:
    model = fsdp(Plain(), group)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.05)
    loss_of(model, torch.ones(2, WIDTH)).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "stepped"


def test_a_step_without_averages_raises() -> None:
    for said in on_ranks(2, forgets):
        assert said.startswith("optimizer.step(): the gradient of layers.0.weight is")
