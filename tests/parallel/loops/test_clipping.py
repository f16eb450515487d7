"""Gradient clipping in every container, against PyTorch's in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    IN_PARTS,
    OWN,
    WIDTH,
    Large,
    Plain,
    Run,
    Strided,
    Tied,
    TwoDtypes,
    Unused,
    Wrap,
    assert_equal,
    batches,
    bounds_of,
    naive,
)
from ranks import on_ranks
from sharded_steps import finish, loss_of
from torch import Tensor, nn

from parallel import mesh
from parallel.data import FSDP, AgreeingGradScaler, BucketedDDP, Zero2, optimizer_of_shards

EVERY = [*OWN, *IN_PARTS]

NORM_TYPES = [1.0, 2.0, 3.0, math.inf]

MAX_NORM = 0.02
"""Below the norm of every step's gradients in the models here."""


def trained(
    group: dist.ProcessGroup | None, wrap: Wrap | None, kind: type[nn.Module], norm_type: float
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after some clipped steps, and the norm of each step's gradients."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    torch.manual_seed(100)
    model = kind() if wrap is None else wrap(kind(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for batch in batches(rank, size):
        loss_of(model, batch).backward()
        finish(model)
        if wrap is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
        else:
            norm = model.clip_grad_norm_(MAX_NORM, norm_type)  # type: ignore[operator]
        norms.append(float(norm))
        optimizer.step()
        model.zero_grad()
    state = model.state_dict()
    return {n.removeprefix("module."): v.clone() for n, v in state.items()}, norms


@pytest.mark.parametrize("kind", [Plain, Tied, Unused, Strided, Large, TwoDtypes])
@pytest.mark.parametrize("wrap", EVERY)
def test_clipped_training_ends_where_one_process_does(wrap: Wrap, kind: type[nn.Module]) -> None:
    wanted, wanted_norms = trained(None, None, kind, 2.0)
    bounds = bounds_of(kind, Run())
    for num_ranks in (2, 4):
        found = on_ranks(num_ranks, trained, wrap, kind, 2.0)
        assert all(norms == found[0][1] for _, norms in found)
        for weights, norms in found:
            assert norms == pytest.approx(wanted_norms, rel=bounds["rtol"])
            assert min(norms) > MAX_NORM
            assert_equal(weights, wanted, **bounds)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("wrap", [naive, *IN_PARTS])
def test_every_norm(wrap: Wrap, norm_type: float) -> None:
    wanted, wanted_norms = trained(None, None, Large, norm_type)
    for weights, norms in on_ranks(3, trained, wrap, Large, norm_type):
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        assert_equal(weights, wanted, rtol=1e-5, atol=1e-6)


class Sums(nn.Module):
    """Gradients are integers: weights of a table times what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(24, 3))
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(72.0).view(24, 3) % 11 - 5
        return (self.weight * table).sum() * x + (self.bias * torch.arange(7.0)).sum() * x


def clipped_integers(
    group: dist.ProcessGroup | None, wrap: Wrap | None, norm_type: float, max_norm: float
) -> tuple[float, Tensor]:
    """The norm, and what a step of one away from zero leaves of the gradients."""
    rank = 0 if group is None else dist.get_rank(group)
    model = Sums() if wrap is None else wrap(Sums(), group)
    # The mean of 1 and 3 is the 2 of one process.
    model(torch.tensor(2.0 if group is None else 1.0 + 2 * rank)).backward()
    finish(model)
    if wrap is None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    else:
        norm = model.clip_grad_norm_(max_norm, norm_type)  # type: ignore[operator]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return float(norm), torch.cat([v.flatten() for v in model.state_dict().values()])


@pytest.mark.parametrize("max_norm", [0.7, 1e9])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("wrap", EVERY)
def test_bit_for_bit_where_sums_are_exact(wrap: Wrap, norm_type: float, max_norm: float) -> None:
    norm, weights = clipped_integers(None, None, norm_type, max_norm)
    for found_norm, found in on_ranks(2, clipped_integers, wrap, norm_type, max_norm):
        assert found_norm == norm
        assert torch.equal(found, weights)


class Split(nn.Module):
    """A weight of which each tensor-parallel rank holds rows, and a bias that all hold."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        self.table = (torch.arange(96.0).view(32, 3) % 11 - 5).chunk(parts)[part]
        self.weight = nn.Parameter(torch.zeros_like(self.table))
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.table).sum() * x + (self.bias * torch.arange(7.0)).sum() * x


def over_a_mesh(group: dist.ProcessGroup, kind: str, norm_type: float) -> tuple[float, Tensor]:
    """dp 2 x tp 2; the norm, and the gradients of the bias after clipping."""
    data, split = mesh.data_group(2, 1, 2), mesh.device_mesh(2, 1, 2).get_group("tp")
    module = Split(dist.get_rank(split), 2)
    wraps = {
        "bucketed": lambda: BucketedDDP(module, group=data),
        "zero_2": lambda: Zero2(module, group=data),
        "fsdp": lambda: FSDP(module, replicate_below=8, group=data),
    }
    model = wraps[kind]()
    model(torch.tensor(1.0 + 2 * dist.get_rank(data))).backward()
    model.finish_gradient_synchronization()
    norm = model.clip_grad_norm_(
        0.5, norm_type, split_group=split, is_split=lambda name: name == "weight"
    )
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return float(norm), model.state_dict()["module.bias"]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("kind", ["bucketed", "zero_2", "fsdp"])
def test_over_tensor_parallel_ranks_too(kind: str, norm_type: float) -> None:
    module = Split(0, 1)
    module(torch.tensor(2.0)).backward()
    wanted = float(nn.utils.clip_grad_norm_(module.parameters(), 0.5, norm_type))
    assert module.bias.grad is not None
    for norm, bias in on_ranks(4, over_a_mesh, kind, norm_type):
        assert norm == wanted
        assert torch.equal(-bias, module.bias.grad)


def plain_call(group: dist.ProcessGroup, wrap: Wrap) -> list[str]:
    """Errors of PyTorch's function and of others' ways to a norm; the gradients stay."""
    torch.manual_seed(100)
    model = wrap(Large(), group)
    loss_of(model, torch.ones(2, WIDTH)).backward()
    finish(model)
    part = next(p.grad for p in model.parameters() if p.grad is not None and p.numel() > WIDTH)
    before = part.clone()
    assert type(before) is Tensor
    calls: list[Any] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True),
        lambda: part.detach().data.norm(2),
        lambda: torch.linalg.norm(part.float()),
    ]
    found = []
    for call in calls:
        with pytest.raises(RuntimeError) as error:
            call()
        found.append(str(error.value))
    assert torch.equal(part, before)
    nn.utils.clip_grad_value_(model.parameters(), 1e-5)
    assert float(part.as_subclass(Tensor).abs().max()) == pytest.approx(1e-5)
    return found


@pytest.mark.parametrize("wrap", IN_PARTS)
def test_pytorchs_function_says_what_to_write(wrap: Wrap) -> None:
    for messages in on_ranks(2, plain_call, wrap):
        for message in messages:
            assert "write model.clip_grad_norm_(max_norm)" in message
            assert "\n" not in message


def clips_too_early(group: dist.ProcessGroup, wrap: Wrap) -> list[str]:
    model = wrap(Plain(), group)
    loss_of(model, torch.ones(2, WIDTH)).backward()
    found = []
    with pytest.raises(RuntimeError) as error:
        model.clip_grad_norm_(1.0)  # type: ignore[operator]
    found.append(str(error.value))
    finish(model)
    held = next(p for p in model.parameters() if p.grad is not None and p.numel())
    if dist.get_rank(group) == 0 or (held.grad.numel() == held.numel() and wrap in OWN):
        held.grad.view(-1)[0] = math.inf
    with pytest.raises(RuntimeError) as error:
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)  # type: ignore[operator]
    found.append(str(error.value))
    return found


@pytest.mark.parametrize("wrap", EVERY)
def test_errors_are_on_all_ranks(wrap: Wrap) -> None:
    for early, infinite in on_ranks(2, clips_too_early, wrap):
        assert early.startswith("clip_grad_norm_(): the gradient of layers.")
        assert "non-finite" in infinite or "is inf" in infinite


def with_a_scaler(group: dist.ProcessGroup, wrap: Wrap) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients are unscaled and then clipped; of the second step one is infinite on one rank."""
    torch.manual_seed(100)
    model = wrap(Large(), group)
    optimizer = optimizer_of_shards(model.parameters(), torch.optim.SGD, lr=0.5)
    scaler = AgreeingGradScaler("cpu", init_scale=8.0, growth_interval=100, group=group)
    norms = []
    for step, batch in enumerate(batches(dist.get_rank(group), group.size())):
        scaler.scale(loss_of(model, batch)).backward()
        finish(model)
        held = [p for p in model.parameters() if p.numel()]
        if step == 1 and dist.get_rank(group) == 0:
            held[0].grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        norms.append(float(model.clip_grad_norm_(MAX_NORM)))  # type: ignore[operator]
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    return {n.removeprefix("module."): v for n, v in model.state_dict().items()}, norms


def without_the_second_step() -> dict[str, Tensor]:
    torch.manual_seed(100)
    model = Large()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, batch in enumerate(batches(0, 1)):
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("wrap", IN_PARTS)
def test_with_a_scaler_and_an_infinity_on_one_rank(wrap: Wrap) -> None:
    for weights, norms in on_ranks(2, with_a_scaler, wrap):
        assert [math.isfinite(norm) for norm in norms] == [True, False, True, True]
        assert_equal(weights, without_the_second_step(), rtol=1e-5, atol=1e-6)


def test_norms_of_no_order() -> None:
    for message in on_ranks(2, no_order):
        assert message == "norm_type=0: must be positive, or inf"


def no_order(group: dist.ProcessGroup) -> str:
    model = FSDP(Plain(), replicate_below=0, group=group)
    with pytest.raises(ValueError, match="norm_type") as error:
        model.clip_grad_norm_(1.0, 0)
    return str(error.value)
