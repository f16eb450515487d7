"""FSDP where forward and backward passes do not alternate, and blocks run in other orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from functools import partial as partial_of

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    IN_PARTS,
    WIDTH,
    Large,
    Wrap,
    assert_equal,
    batches,
    bucketed,
    fsdp,
    naive,
)
from ranks import on_ranks
from sharded_steps import finish, sharded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel.data import FSDP

SHARDED = [*IN_PARTS, sharded]

Step = Callable[[nn.Module, Tensor], None]


class Deep(Large):
    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(nn.Linear(WIDTH, WIDTH) for _ in range(3))


class Checkpointed(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False)) * self.scale
        return self.last(x)


class Shuffled(Deep):
    """Layers run in another order than they are registered."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (3, 0, 5, 1, 2, 4):
            x = torch.tanh(self.layers[number](x)) * self.scale
        return self.last(x)


class Alternating(Deep):
    """Every other call runs the layers backwards."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers if self.calls % 2 == 0 else reversed(self.layers):
            x = torch.tanh(layer(x)) * self.scale
        return self.last(x)


class Shared(Deep):
    """Layers run several times, as ALBERT's."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 1, 2, 3, 4, 5, 5, 0):
            x = torch.tanh(self.layers[number](x)) * self.scale
        return self.last(x)


class SharedCheckpointed(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 2, 3, 4, 5, 5):
            x = torch.tanh(checkpoint(self.layers[number], x, use_reentrant=False)) * self.scale
        return self.last(x)


def two_passes(model: nn.Module, batch: Tensor) -> None:
    """Two forward passes before one backward pass, as in DPO and contrastive losses."""
    first, second = batch.chunk(2)
    (model(first).float().square().mean() - 0.5 * model(second).float().tanh().mean()).backward()


def three_passes(model: nn.Module, batch: Tensor) -> None:
    """Each output is the next pass's input."""
    outputs = batch
    for _ in range(3):
        outputs = model(outputs)[:, :WIDTH].float()
    outputs.square().mean().backward()


def reference(model: nn.Module, batch: Tensor) -> None:
    """A forward pass without a graph between the two of a step."""
    outputs = model(batch)
    with torch.no_grad():
        target = model(batch * 0.5)
    (outputs - target).float().square().mean().backward()


def dropped(model: nn.Module, batch: Tensor) -> None:
    """A graph that is thrown away, and one that outlives the step."""
    model(batch)
    model.kept = model(batch * 2).sum().view(1)  # type: ignore[assignment]
    model(batch).float().square().mean().backward()


def twice(model: nn.Module, batch: Tensor) -> None:
    """The same graph twice."""
    loss = model(batch).float().square().mean()
    if hasattr(model, "no_sync"):
        with model.no_sync():
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
    else:
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    loss.backward()


def one_pass(model: nn.Module, batch: Tensor) -> None:
    model(batch).float().square().mean().backward()


def partial(model: nn.Module, batch: Tensor) -> None:
    """Gradients of three graphs in two backward passes; the first waits."""
    losses = [model(batch * (1 + n)).float().square().mean() for n in range(3)]
    if hasattr(model, "no_sync"):
        with model.no_sync():
            losses[1].backward()
    else:
        losses[1].backward()
    (losses[0] + losses[2]).backward()


def trained(
    group: dist.ProcessGroup | None, wrap: Wrap | None, kind: type[nn.Module], step: Step
) -> dict[str, Tensor]:
    rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    torch.manual_seed(100)
    model = kind() if wrap is None else wrap(kind(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches(rank, size):
        step(model, batch)
        finish(model)
        optimizer.step()
        model.zero_grad()
    state = model.state_dict()
    return {n.removeprefix("module."): v.clone() for n, v in state.items()}


STEPS = [two_passes, three_passes, reference, dropped, twice, partial]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("wrap", [naive, bucketed, *SHARDED])
def test_passes_do_not_have_to_alternate(wrap: Wrap, step: Step) -> None:
    check(wrap, Checkpointed if wrap is sharded else Deep, step)


@pytest.mark.parametrize("step", [one_pass, two_passes, reference, twice])
@pytest.mark.parametrize("kind", [Shuffled, Alternating, Shared, SharedCheckpointed])
@pytest.mark.parametrize("wrap", [fsdp, sharded])
def test_blocks_run_in_any_order(wrap: Wrap, kind: type[nn.Module], step: Step) -> None:
    check(wrap, kind, step)


@cache
def wanted_of(kind: type[nn.Module], step: Step) -> dict[str, Tensor]:
    return on_ranks(2, by_hand, kind, step)[0]


def check(wrap: Wrap, kind: type[nn.Module], step: Step) -> None:
    wanted = wanted_of(kind, step)
    for found in on_ranks(2, trained, wrap, kind, step):
        assert_equal(found, wanted, rtol=2e-5, atol=2e-6)


def by_hand(group: dist.ProcessGroup, kind: type[nn.Module], step: Step) -> dict[str, Tensor]:
    """A plain module, whose gradients the test averages."""
    torch.manual_seed(100)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches(dist.get_rank(group), group.size()):
        step(model, batch)
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()
        optimizer.step()
        model.zero_grad()
    return {n: v.clone() for n, v in model.state_dict().items()}


def autocast(step: Step, model: nn.Module, batch: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step(model, batch)


def in_bfloat16(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return FSDP(module, torch.bfloat16, replicate_below=0, group=group)


@pytest.mark.parametrize(
    ("kind", "step"), [(Deep, two_passes), (Shared, one_pass), (Deep, reference)]
)
def test_in_bfloat16(kind: type[nn.Module], step: Step) -> None:
    wanted = on_ranks(2, by_hand, kind, step)[0]
    for found in on_ranks(2, trained, in_bfloat16, kind, partial_of(autocast, step)):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=3e-2, atol=3e-2)
