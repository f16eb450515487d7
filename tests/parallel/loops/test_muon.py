"""Optimizers of whole matrices: each matrix has one owner, and shards are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import WIDTH, Large, Wrap, assert_equal, batches, bucketed, fsdp, zero_1
from ranks import on_ranks
from sharded_steps import finish, loss_of
from torch import Tensor, nn

from parallel.data import ShardedOptimizer, optimizer_of_shards
from parallel.data.sharded_optimizer import newton_schulz_flops


class OwnMuon(torch.optim.Optimizer):
    """As in others' loops: orthogonal steps for matrices, and signs of gradients for vectors.

    In the parameters' dtype, so that one process in float64 is met to rounding; without a closure.
    """

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.sub_(orthogonal(buffer) if p.dim() == 2 else buffer.sign(), alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz iterations with Jordan's coefficients."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


def train(
    model: nn.Module, group: dist.ProcessGroup | None, rank: int, of: int
) -> dict[str, Tensor]:
    """Muon for matrices and AdamW for the rest, each with a schedule."""
    named = list(model.named_parameters())
    matrices = [p for _, p in named if p.dim() == 2]
    rest = [p for _, p in named if p.dim() != 2]
    optimizers: list[torch.optim.Optimizer] = []
    for members, kind, options in (
        (matrices, torch.optim.Muon, MUON),
        (rest, torch.optim.AdamW, {"lr": 0.01}),
    ):
        if group is None:
            optimizers.append(kind(members, **options))
        else:
            optimizers.append(ShardedOptimizer(members, kind, process_group=group, **options))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]
    for batch in batches(rank, of):
        loss_of(model, batch).backward()
        finish(model)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    states = {
        f"moment {n}": state["momentum_buffer"]
        for n, state in optimizers[0].state_dict()["state"].items()
    }
    weights = {n.removeprefix("module."): v.clone() for n, v in model.state_dict().items()}
    return {**weights, **states}


def train_on_rank(group: dist.ProcessGroup) -> dict[str, Tensor]:
    torch.manual_seed(100)
    return train(bucketed(Large(), group), group, dist.get_rank(group), group.size())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_as_in_one_process(num_ranks: int) -> None:
    torch.manual_seed(100)
    wanted = train(Large(), None, 0, 1)
    for found in on_ranks(num_ranks, train_on_rank):
        # Newton-Schulz iterations are in bfloat16.
        assert_equal(found, wanted, rtol=2e-2, atol=2e-3)


def own_steps(group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """The optimizer has all parameters in two groups, of which the first one's rate changes."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    torch.manual_seed(100)
    module = Large().double()
    model = module if group is None else bucketed(module, group)
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.05}, {"params": others}]
    optimizer = (
        OwnMuon(groups, momentum=0.8)
        if group is None
        else ShardedOptimizer(groups, OwnMuon, process_group=group, momentum=0.8)
    )
    for batch in batches(rank, size):
        model(batch.double()).square().mean().backward()
        finish(model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.5
    return {n.removeprefix("module."): v.clone() for n, v in model.state_dict().items()}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ones_own_muon_to_rounding(num_ranks: int) -> None:
    wanted = own_steps(None)
    for found in on_ranks(num_ranks, own_steps):
        assert_equal(found, wanted, rtol=1e-10, atol=1e-12)


def shares(group: dist.ProcessGroup, kind: Any, work: Any) -> tuple[list[float], list[int]]:
    sizes = [(16, 16), (2, 128), (2, 128), (2, 128), (2, 128)]
    params = [nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = ShardedOptimizer(params, kind, process_group=group, work=work, lr=0.1)
    return optimizer.work, [optimizer.owner(p) for p in params]


def test_matrices_are_shared_out_by_work() -> None:
    """All have 256 elements; one of 16 x 16 costs 24,576 FLOPs and the others 2,064 each."""
    assert newton_schulz_flops(torch.ones(16, 16)) == 24576
    assert newton_schulz_flops(torch.ones(128, 2)) == 2064
    assert newton_schulz_flops(torch.ones(7)) == 7
    assert on_ranks(2, shares, torch.optim.Muon, None)[0] == ([24576, 8256], [0, 1, 1, 1, 1])
    assert on_ranks(2, shares, torch.optim.SGD, None)[0] == ([768, 512], [0, 1, 0, 1, 0])
    assert on_ranks(2, shares, torch.optim.SGD, newton_schulz_flops)[0][1] == [0, 1, 1, 1, 1]


def refusals(group: dist.ProcessGroup, wrap: Wrap) -> list[str]:
    model = wrap(Large(), group)
    weights = [p for name, p in model.named_parameters() if "weight" in name]
    said = []

    def step_of_adafactor() -> None:
        optimizer = torch.optim.Adafactor(weights)
        loss_of(model, torch.ones(2, WIDTH)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    def step_of_ones_own() -> None:
        # Its shards are vectors, of which it would take the signs.
        optimizer = OwnMuon(weights)
        optimizer.step()

    for make in (
        lambda: ShardedOptimizer(weights, torch.optim.Muon, process_group=group),
        lambda: optimizer_of_shards(weights, torch.optim.Muon),
        step_of_adafactor,
        step_of_ones_own,
    ):
        try:
            make()
            said.append("made")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("wrap", [fsdp, zero_1])
def test_shards_are_refused(wrap: Wrap) -> None:
    whole = (
        "does not update each element by itself, and ranks hold parts of parameters here: use "
        "ShardedOptimizer with BucketedDDP, which leave parameters whole"
    )
    for said in on_ranks(2, refusals, wrap):
        assert said == [
            "ShardedOptimizer shares out whole parameters, and these are shards: use "
            "optimizer_of_shards, or BucketedDDP for optimizers of whole matrices",
            f"Muon {whole}",
            f"optimizer.step(): Adafactor {whole}",
            f"optimizer.step(): OwnMuon {whole}",
        ]
