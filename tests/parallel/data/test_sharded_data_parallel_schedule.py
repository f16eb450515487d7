"""ZeRO and FSDP on gloo ranks: when weights and gradients travel, and how long they are held."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    IN_PARTS,
    WIDTH,
    Large,
    Plain,
    Run,
    Wrap,
    assert_equal,
    expected,
    fsdp,
    train_on_rank,
    zero_1,
    zero_2,
)
from ranks import on_ranks
from sharded_steps import finish, loss_of, sharded
from torch import Tensor, nn

from parallel import STRATEGIES
from parallel.data import FSDP, Zero1, Zero2, optimizer_of_shards, zero
from parallel.data.flat import ALIGNMENT, start_all_gather
from parallel.data.fsdp import weights as fsdp_weights
from parallel.data.gradients import Averager
from parallel.data.shard_gradients import ShardTransfer


def shares(group: dist.ProcessGroup, wrap: Wrap) -> dict[str, int]:
    """Elements that a rank holds of a model, after a step of AdamW."""
    model = wrap(Large(), group)
    optimizer = optimizer_of_shards(model.parameters(), torch.optim.AdamW, lr=0.1)
    loss_of(model, torch.ones(2, WIDTH)).backward()
    finish(model)
    gradients = {
        part.grad.untyped_storage().data_ptr(): part.grad.untyped_storage().nbytes() // 4
        for part in model.parameters()
        if part.grad is not None
    }
    whole = [p.grad for p in model.module.parameters() if p.grad is not None]
    whole = [g for g in whole if g.untyped_storage().data_ptr() not in gradients]
    shards = {p.data_ptr() for p in model.parameters()}
    optimizer.step()
    return {
        "whole gradients": len(whole),
        "parts": sum(p.numel() for p in model.parameters()),
        "gradients": sum(gradients.values()),
        "state": sum(s["exp_avg"].numel() for s in optimizer.state.values()),
        # FSDP's are the shards.
        "parameters": sum(
            p.numel() for p in model.module.parameters() if p.data_ptr() not in shards
        ),
    }


def test_who_holds_what() -> None:
    """Large: 3 layers of 64 + 8, and 344 + 43 elements: 603; buffers of 4 * 128 + 448."""
    for wrap in IN_PARTS:
        ranks = on_ranks(3, shares, wrap)
        assert [found["whole gradients"] for found in ranks] == [0, 0, 0]
        # FSDP's biases of 8 elements are on all ranks.
        assert sum(found["parts"] for found in ranks) == 603 + (2 * 24 if wrap is fsdp else 0)
        for found in ranks:
            assert found["state"] == found["parts"]
            if wrap is fsdp:
                assert found["parameters"] == 0
            else:
                assert found["parameters"] >= 603 * 2 / 3 - 7 * ALIGNMENT
            if wrap is zero_1:
                assert found["gradients"] >= 603
            else:
                assert found["gradients"] <= 603 / 3 + 7 * ALIGNMENT


def slots(group: dist.ProcessGroup) -> tuple[list[int], list[int], list[bool], list[bool]]:
    module = Large()
    model = FSDP(module, replicate_below=0, group=group)
    seen: list[int] = []
    for layer in module.layers:
        layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight.data_ptr()) and None)
    loss_of(model, torch.ones(2, WIDTH)).backward()
    # The first two blocks, and the weights outside of blocks.
    weights = [module.layers[0].weight, module.layers[1].weight, module.last.weight]
    shown = [weight.numel() for weight in weights]
    memory = [unit._slot.memory(torch.device("cpu")) for unit in (*model._units, model._rest)]
    storages = [memory[number].untyped_storage() for number in (0, 1, 3)]
    during = [storage.nbytes() > 0 for storage in storages]
    finish(model)
    return seen, shown, during, [storage.nbytes() > 0 for storage in storages]


def test_blocks_take_turns_in_two_slots() -> None:
    """And each slot is given back when the last block in it has been left."""
    for (first, second, third), shown, during, after in on_ranks(2, slots):
        assert first == third != second
        assert shown == [WIDTH**2, 0, WIDTH * (5 * WIDTH + 3)]
        assert during == [True, False, True]
        assert after == [False, False, False]


@contextlib.contextmanager
def recorded(events: list[str]) -> Iterator[None]:
    """Names of the collectives that are started."""

    def noting(event: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            events.append(event)
            return original(*arguments)

        return call

    with contextlib.ExitStack() as patches:
        reduce = noting("reduce", Averager.start)
        patches.enter_context(mock.patch.object(Averager, "start", reduce))
        for module in (zero, fsdp_weights):
            gather = noting("gather", start_all_gather)
            patches.enter_context(mock.patch.object(module, "start_all_gather", gather))
        yield


def sequence(group: dist.ProcessGroup, wrap: Wrap, model_of: type[nn.Module]) -> list[str]:
    """The events of a step in their order; blocks by their numbers."""
    events: list[str] = []
    module = model_of()
    model = wrap(module, group)
    for number, layer in enumerate(module.layers):

        def note(_: nn.Module, __: Any, output: Tensor, number: int = number) -> None:
            events.append(f"forward {number}")
            output.register_hook(lambda _: events.append(f"backward {number}"))

        layer.register_forward_hook(note)
    optimizer = optimizer_of_shards(model.parameters(), torch.optim.SGD, lr=0.1)
    sign = 1.0 if dist.get_rank(group) == 0 else -1.0
    with recorded(events):
        loss_of(model, torch.full((2, WIDTH), sign)).backward()
        finish(model)
        events.append("step")
        optimizer.step()
    return events


def test_zero_gathers_in_forward_and_reduces_in_backward() -> None:
    """Three buckets of a layer each; the first one's gradients are there when backward ends."""
    wanted = [
        # Shards may have been written to before the first pass too.
        *("gather", "gather", "gather", "forward 0", "forward 1", "forward 2"),
        *("backward 2", "reduce", "backward 1", "reduce", "backward 0", "reduce"),
        "step",
    ]
    for wrap in (zero_1, zero_2):
        assert on_ranks(2, sequence, wrap, Plain) == [wanted, wanted]


def test_fsdp_gathers_ahead_and_reduces_behind() -> None:
    """Backward begins with the last block, and meanwhile asks for the one before it."""
    wanted = [
        # The third, when the first has been used.
        *("gather", "gather", "forward 0", "gather", "forward 1", "forward 2"),
        *("gather", "gather", "backward 2", "reduce", "gather", "backward 1", "reduce"),
        *("backward 0", "reduce"),
        "step",
    ]
    assert on_ranks(2, sequence, sharded, Plain) == [wanted, wanted]


class Skipping(Plain):
    """The third of four layers is used where the first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](y) if x[0, 0] > 0 else y)


def test_ranks_that_use_other_blocks_ask_for_the_same() -> None:
    """In one order: else the first rank's reduction would meet the second's gathering."""
    first, second = on_ranks(2, sequence, sharded, Skipping)
    assert "forward 2" in first
    assert "forward 2" not in second
    calls = [
        [event for event in found if event in ("gather", "reduce")] for found in (first, second)
    ]
    assert calls[0] == calls[1]
    assert calls[0].count("reduce") == 4


class Deep(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(nn.Linear(WIDTH, WIDTH) for _ in range(4))


def most_in_flight(group: dist.ProcessGroup, wrap: Wrap) -> int:
    model = wrap(Deep(), group)
    counts = []
    start = ShardTransfer.start

    def counting(transfer: ShardTransfer, group: dist.ProcessGroup) -> None:
        start(transfer, group)
        counts.append(sum(other._under_way is not None for other in model._transfers))

    ShardTransfer.start = counting  # type: ignore[method-assign]
    try:
        loss_of(model, torch.ones(2, WIDTH)).backward()
        finish(model)
    finally:
        ShardTransfer.start = start  # type: ignore[method-assign]
    assert len(counts) == 7
    return max(counts)


@pytest.mark.parametrize(("wrap", "most"), [(zero_2, 4), (sharded, 1)])
def test_few_whole_gradients_are_there_at_once(wrap: Wrap, most: int) -> None:
    assert on_ranks(2, most_in_flight, wrap) == [most, most]


def whole_gradients_left(group: dist.ProcessGroup, wrap: Wrap) -> tuple[int, int]:
    """Buffers of whole gradients that there were, and that are there while the optimizer steps."""
    model = wrap(Deep(), group)
    make, buffers = ShardTransfer._make_buffer, []

    def noting(transfer: ShardTransfer) -> Tensor:
        buffer = make(transfer)
        buffers.append(weakref.ref(buffer))
        return buffer

    with mock.patch.object(ShardTransfer, "_make_buffer", noting):
        loss_of(model, torch.ones(2, WIDTH)).backward()
        finish(model)
    return len(buffers), sum(buffer() is not None for buffer in buffers)


@pytest.mark.parametrize("wrap", [zero_2, sharded])
def test_no_whole_gradient_is_left_for_the_step(wrap: Wrap) -> None:
    assert on_ranks(2, whole_gradients_left, wrap) == [(7, 0), (7, 0)]


class Recurrent(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Elsewhere(Plain):
    """The last block is called, and its weight is used again after the others."""

    def forward(self, x: Tensor) -> Tensor:
        last = self.layers[2].weight
        return super().forward(x) + nn.functional.linear(x, last)


def as_a_whole(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return FSDP(module, blocks=[], replicate_below=0, group=group)


class TestOrderOfBlocks:
    @pytest.mark.parametrize("wrap", [sharded, as_a_whole])
    def test_a_block_may_run_again(self, wrap: Wrap) -> None:
        for found in on_ranks(2, train_on_rank, wrap, Recurrent, Run()):
            assert_equal(found, expected(Recurrent, Run()), rtol=1e-5, atol=1e-6)

    def test_without_blocks_weights_may_be_used_anywhere(self) -> None:
        for found in on_ranks(2, train_on_rank, as_a_whole, Elsewhere, Run()):
            assert_equal(found, expected(Elsewhere, Run()), rtol=1e-5, atol=1e-6)


def under_way(group: dist.ProcessGroup, name: str) -> list[bool]:
    """Whether a gathering is, once one has begun and after the task is done with the model."""
    model = {"zero_1": Zero1, "zero_2": Zero2}[name](nn.Linear(8, 8), group=group)
    optimizer = optimizer_of_shards(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    model._make_whole()
    found = []
    for _ in range(2):
        found.append(any(bucket._gathering is not None for bucket in model._buckets))
        STRATEGIES[name].target(name=name).finish(model)
    return found


@pytest.mark.parametrize("name", ["zero_1", "zero_2"])
def test_a_task_ends_when_the_last_gathering_has(name: str) -> None:
    assert on_ranks(2, under_way, name) == [[True, False]] * 2
