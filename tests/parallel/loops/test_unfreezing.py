"""Parameters that are frozen when wrapped and trained later, or the other way round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    IN_PARTS,
    OWN,
    WIDTH,
    Large,
    Wrap,
    assert_equal,
    batches,
    fsdp,
    naive,
    overlapped,
)
from ranks import on_ranks
from sharded_steps import finish, loss_of, sharded
from torch import Tensor, nn

from parallel.data import optimizer_of_shards

EVERY = [*OWN, *IN_PARTS, sharded]

Setting = Callable[[nn.Module, str, bool], None]


def in_the_module(model: nn.Module, name: str, trains: bool) -> None:
    inner = getattr(model, "module", model)
    for own, parameter in inner.named_parameters():
        if name in own:
            parameter.requires_grad_(trains)


def in_the_container(model: nn.Module, name: str, trains: bool) -> None:
    for own, parameter in model.named_parameters():
        if name in own:
            parameter.requires_grad_(trains)


def everything(model: nn.Module, name: str, trains: bool) -> None:
    model.requires_grad_(trains)


def gradual(
    group: dist.ProcessGroup | None, wrap: Wrap | None, setting: Setting, late: str, then: str
) -> dict[str, Tensor]:
    """``late`` trains from the second step on, and ``then`` only before the third."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    torch.manual_seed(100)
    module = Large()
    in_the_module(module, late, False)
    model = module if wrap is None else wrap(module, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(batches(rank, size)):
        if step == 1:
            setting(model, late, True)
        if step == 2 and then:
            setting(model, then, False)
        first, second = batch.chunk(2)
        if wrap is None:
            (loss_of(model, first) / 2).backward()
        else:
            with model.no_sync():  # type: ignore[operator]
                (loss_of(model, first) / 2).backward()
        (loss_of(model, second) / 2).backward()
        finish(model)
        optimizer.step()
        model.zero_grad()
    return {n.removeprefix("module."): v.clone() for n, v in model.state_dict().items()}


CHANGES: list[tuple[Setting, str, str]] = [
    (in_the_module, "layers.0", ""),
    (in_the_module, "bias", "layers.2"),
    (in_the_module, "last", "layers.0.weight"),
    (in_the_container, "layers", "last"),
    (everything, "layers.1", ""),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c[0].__name__} {c[1]} {c[2]}")
@pytest.mark.parametrize("wrap", EVERY)
def test_layers_thaw_and_freeze(wrap: Wrap, change: tuple[Setting, str, str]) -> None:
    wanted = gradual(None, None, *change)
    ranks = on_ranks(2, gradual, wrap, *change)
    for found in ranks:
        assert_equal(found, wanted, rtol=1e-5, atol=1e-6)
    assert_equal(ranks[0], ranks[1], rtol=0, atol=0)


def of_its_own(group: dist.ProcessGroup | None, wrap: Wrap | None) -> dict[str, Tensor]:
    """Thawed parameters come to the optimizer as a group with a rate of their own."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    torch.manual_seed(100)
    module = Large()
    in_the_module(module, "layers.1", False)
    model = module if wrap is None else wrap(module, group)
    trained = [p for p in model.parameters() if p.requires_grad]
    if wrap is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=0.01)
    else:
        optimizer = optimizer_of_shards(trained, torch.optim.AdamW, lr=0.01)
    for step, batch in enumerate(batches(rank, size)):
        if step == 2:
            in_the_container(model, "layers.1", True)
            late = [p for n, p in model.named_parameters() if "layers.1" in n]
            optimizer.add_param_group({"params": late, "lr": 0.02})
        loss_of(model, batch).backward()
        finish(model)
        optimizer.step()
        model.zero_grad()
    optimizer.state_dict()
    return {n.removeprefix("module."): v.clone() for n, v in model.state_dict().items()}


@pytest.mark.parametrize("wrap", IN_PARTS)
def test_thawed_layers_have_a_rate_of_their_own(wrap: Wrap) -> None:
    for found in on_ranks(2, of_its_own, wrap):
        assert_equal(found, of_its_own(None, None), rtol=1e-4, atol=1e-5)


def between_passes(group: dist.ProcessGroup, wrap: Wrap) -> str:
    module = Large()
    in_the_module(module, "last", False)
    model = wrap(module, group)
    batch = torch.ones(2, WIDTH)
    loss_of(model, batch).backward()
    in_the_module(model, "last", True)
    with pytest.raises(RuntimeError) as error:
        loss_of(model, batch)
    return str(error.value)


@pytest.mark.parametrize("wrap", [overlapped, fsdp])
def test_thawed_before_gradients_are_averaged(wrap: Wrap) -> None:
    for message in on_ranks(2, between_passes, wrap):
        assert message.startswith("last.weight trains since the last backward pass")
        assert "\n" not in message


def called_inside(group: dist.ProcessGroup, wrap: Wrap) -> str:
    """What the finishing says, or else whether both ranks have one gradient."""
    module = Large()
    in_the_module(module, "last", False)
    model = wrap(module, group)
    in_the_module(model, "last", True)
    loss_of(module, torch.full((2, WIDTH), 1.0 + dist.get_rank(group))).backward()
    try:
        finish(model)
    except RuntimeError as error:
        return str(error)
    assert module.last.weight.grad is not None
    other = module.last.weight.grad.clone()
    dist.broadcast(other, group=group, group_src=0)
    return str(torch.equal(other, module.last.weight.grad))


@pytest.mark.parametrize(("wrap", "says"), [(naive, "True"), (overlapped, "last.weight trains")])
def test_thawed_layers_of_a_module_that_is_called_itself(wrap: Wrap, says: str) -> None:
    for message in on_ranks(2, called_inside, wrap):
        assert message.startswith(says)
