"""The sharded optimizer on gloo ranks: it steps as the optimizer it wraps, with a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from strategy_training import case_of, train_case, train_case_on_rank
from torch import Tensor, nn

from harness.tasks.training.train_step import TrainStep
from parallel.data import ShardedOptimizer

SIZES = [(6, 10), (3,), (20,), (5, 5), (7,)]
"""60, 3, 20, 25 and 7 elements: 115 in all."""

OPTIONS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.AdamW: {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)},
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adagrad: {"lr": 0.1},
}

Kind = type[torch.optim.Optimizer]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    found = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    # Not contiguous.
    found[3] = nn.Parameter(found[3].detach().t())
    return found


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, the second with a learning rate of its own."""
    return [{"params": params[:2]}, {"params": params[2:4], "lr": 0.02}]


def steps(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], first: int, last: int
) -> None:
    """Steps ``first`` to ``last`` of one fixed training."""
    for step in range(first, last):
        if step == 2:
            # As when layers are unfrozen.
            optimizer.add_param_group({"params": params[4:], "lr": 0.3})
        if step == 3:
            optimizer.param_groups[0]["lr"] *= 0.5

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = sum((p * (step + 1) - 0.5).square().sum() for p in params)
            assert isinstance(loss, Tensor)
            loss.backward()
            return loss

        # Parameters that are frozen again have gradients and are not stepped.
        assert optimizer.step(closure) is not None


def plain(kind: Kind, last: int = 5) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = parameters()
    optimizer = kind(groups(params), **OPTIONS[kind])  # type: ignore[call-arg]
    steps(optimizer, params, 0, last)
    return params, optimizer


def train(group: dist.ProcessGroup | None, kind: Kind) -> dict[str, Any]:
    params = parameters()
    optimizer = ShardedOptimizer(groups(params), kind, process_group=group, **OPTIONS[kind])
    steps(optimizer, params, 0, 5)
    held = sum(p.numel() for p, state in optimizer.state.items() if state)
    return {
        "params": [p.detach() for p in params],
        "held": held,
        "num_elements": optimizer.num_elements,
        "state": optimizer.state_dict(),
    }


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["state"].keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        assert found["state"][number].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(found["state"][number][name], value, rtol=0, atol=0)
    assert [g["params"] for g in found["param_groups"]] == [
        g["params"] for g in wanted["param_groups"]
    ]
    assert [g["lr"] for g in found["param_groups"]] == [g["lr"] for g in wanted["param_groups"]]


@pytest.mark.parametrize("kind", list(OPTIONS))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_steps_are_those_of_the_optimizer_it_wraps(kind: Kind, num_ranks: int) -> None:
    """Bit for bit, groups, schedule and unfreezing included; state of the own part alone."""
    params, optimizer = plain(kind)
    ranks = on_ranks(num_ranks, train, kind)
    for found in ranks:
        for got, wanted in zip(found["params"], params, strict=True):
            assert torch.equal(got, wanted)
        assert_same_state(found["state"], optimizer.state_dict())
    assert [found["held"] for found in ranks] == ranks[0]["num_elements"]
    assert sum(ranks[0]["num_elements"]) == 115


def test_balanced_by_elements() -> None:
    """By hand: 60 against 25 + 20 + 3 first, and 7 later to the one with fewer."""
    found, _ = on_ranks(2, train, torch.optim.SGD)
    assert found["num_elements"] == [60, 55]


def largest_first(group: dist.ProcessGroup) -> list[int]:
    params = [nn.Parameter(torch.ones(size)) for size in (1, 1, 1, 3)]
    options = {"process_group": group, "lr": 0.1}
    return ShardedOptimizer(params, torch.optim.SGD, **options).num_elements


def test_the_largest_are_given_an_owner_first() -> None:
    assert on_ranks(2, largest_first) == [[3, 3], [3, 3]]


def aligned(group: dist.ProcessGroup) -> list[tuple[bool, int, tuple[int, ...]]]:
    params = parameters()
    ShardedOptimizer(params, torch.optim.SGD, process_group=group, lr=0.1)
    starts = [p.untyped_storage().data_ptr() for p in params]
    offsets = [p.storage_offset() * p.element_size() for p in params]
    return [
        (o % 128 == 0, len(set(starts)), p.stride()) for o, p in zip(offsets, params, strict=True)
    ]


def test_parameters_are_views_of_a_buffer_for_each_owner() -> None:
    """Aligned, and laid out as before."""
    strides = [p.stride() for p in parameters()]
    for found in on_ranks(2, aligned):
        assert found == [(True, 2, stride) for stride in strides]


def test_one_rank_without_a_process_group() -> None:
    params, optimizer = plain(torch.optim.AdamW)
    found = train(None, torch.optim.AdamW)
    for got, wanted in zip(found["params"], params, strict=True):
        assert torch.equal(got, wanted)
    assert_same_state(found["state"], optimizer.state_dict())


def resume(
    group: dist.ProcessGroup | None, weights: list[Tensor], state: dict[str, Any]
) -> list[Tensor]:
    """The last two steps, from a checkpoint after the third."""
    kind = torch.optim.AdamW
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = ShardedOptimizer(
        [*groups(params), {"params": params[4:]}], kind, process_group=group, **OPTIONS[kind]
    )
    optimizer.load_state_dict(state)
    steps(optimizer, params, 3, 5)
    return [p.detach() for p in params]


def save(group: dist.ProcessGroup) -> tuple[list[Tensor], dict[str, Any]]:
    kind = torch.optim.AdamW
    params = parameters()
    optimizer = ShardedOptimizer(groups(params), kind, process_group=group, **OPTIONS[kind])
    steps(optimizer, params, 0, 3)
    return [p.detach() for p in params], optimizer.state_dict()


@pytest.mark.parametrize("later", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [2, 3])
def test_a_checkpoint_goes_on_at_another_world_size(before: int, later: int) -> None:
    wanted, _ = plain(torch.optim.AdamW)
    weights, state = on_ranks(before, save)[0]
    ranks = (
        [resume(None, weights, state)] if later == 1 else on_ranks(later, resume, weights, state)
    )
    for found in ranks:
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)


def one_parameter(group: dist.ProcessGroup) -> float:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([parameter], torch.optim.SGD, process_group=group, lr=0.5)
    parameter.grad = torch.ones(3)
    optimizer.step()
    return float(parameter.detach().sum())


def test_a_rank_may_own_nothing() -> None:
    assert on_ranks(2, one_parameter) == [1.5, 1.5]


class TestBadInput:
    def test_no_parameters(self) -> None:
        with pytest.raises(ValueError, match=r"^optimizer got an empty parameter list$"):
            ShardedOptimizer([], torch.optim.AdamW)

    def test_devices(self) -> None:
        split = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, device="meta"))]
        with pytest.raises(ValueError, match=r"^a parameter of shape \(2,\) is on meta and others"):
            ShardedOptimizer(split, torch.optim.AdamW)

    def test_state_of_other_groups(self) -> None:
        state = ShardedOptimizer(parameters(), torch.optim.AdamW).state_dict()
        other = ShardedOptimizer(parameters()[:2], torch.optim.AdamW)
        with pytest.raises(ValueError, match=r"^the state is of parameter groups of \[5\] param"):
            other.load_state_dict(state)


STRATEGIES = ["sharded_optimizer", "zero_redundancy_torch"]


class TestStrategies:
    @pytest.mark.parametrize("name", STRATEGIES)
    def test_transformer_ends_where_one_process_does(self, name: str) -> None:
        wanted = train_case(case_of(), 0, 4)
        for found in on_ranks(4, train_case_on_rank, case_of(f"parallel={name}", "parallel.dp=4")):
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_one_rank(self, name: str) -> None:
        found = train_case(case_of(f"parallel={name}", "parallel.dp=1"), 0, 1)
        for got, want in zip(found, train_case(case_of(), 0, 1), strict=True):
            assert torch.equal(got, want)

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_predicted_state_is_divided(self, name: str) -> None:
        whole, part = case_of("parallel=ddp_naive"), case_of(f"parallel={name}", "parallel.dp=4")
        assert isinstance(part.task, TrainStep)
        state = part.task.predicted_memory(part)["optimizer_state"]
        assert state == whole.task.predicted_memory(whole)["optimizer_state"] / 4
