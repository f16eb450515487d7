"""ZeRO and FSDP on gloo ranks: training ends where the whole model's would; states move between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    IN_PARTS,
    WIDTH,
    Large,
    Plain,
    Run,
    Tied,
    Unused,
    Wrap,
    assert_equal,
    batches,
    bucketed,
    expected,
    train_on_rank,
    zero_1,
)
from ranks import on_ranks
from sharded_steps import finish, loss_of, sharded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from parallel.data import FSDP, AgreeingGradScaler, optimizer_of_shards, zero
from parallel.data.flat import start_all_gather

Kind = type[torch.optim.Optimizer]


@pytest.mark.parametrize("model", [Plain, Tied, Large])
@pytest.mark.parametrize("run", [Run(), Run(passes=2)], ids=["plain", "accumulated"])
def test_bit_for_bit_as_all_reduce(model: type[nn.Module], run: Run) -> None:
    """Two ranks' gradients have one sum, in whichever pieces it is computed."""
    wanted = on_ranks(2, train_on_rank, bucketed, model, run)[0]
    for wrap in IN_PARTS:
        for found in on_ranks(2, train_on_rank, wrap, model, run):
            assert_equal(found, wanted, rtol=0, atol=0)


class LateGather:
    """An all-gather that arrives when it is waited for, and is not a number until then."""

    def __init__(self, buffer: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
        self._buffer, self._arriving = buffer, torch.empty_like(buffer)
        dist.all_gather_into_tensor(self._arriving, part, group=group)
        buffer.fill_(float("nan"))

    def wait(self) -> None:
        self._buffer.copy_(self._arriving)


class Functional(Plain):
    """One layer is never called, its weight is used by another module."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layers[1](self.layers[0](x)), self.layers[2].weight)


def train_late(group: dist.ProcessGroup, wrap: Wrap, model: type[nn.Module]) -> dict[str, Tensor]:
    zero.start_all_gather = LateGather  # type: ignore[assignment]
    try:
        torch.manual_seed(100)
        container = wrap(model(), group)
        optimizer = optimizer_of_shards(container.parameters(), torch.optim.SGD, lr=0.05)
        for batch in batches(dist.get_rank(group), group.size()):
            loss_of(container, batch).backward()
            finish(container)
            optimizer.step()
            optimizer.zero_grad()
        return {n.removeprefix("module."): v for n, v in container.state_dict().items()}
    finally:
        zero.start_all_gather = start_all_gather


def plain_sgd(model: type[nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(100)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for batch in batches(0, 1):
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


@pytest.mark.parametrize("model", [Plain, Tied, Functional])
def test_no_parameter_is_used_before_it_has_arrived(model: type[nn.Module]) -> None:
    for found in on_ranks(2, train_late, zero_1, model):
        assert_equal(found, plain_sgd(model), rtol=1e-5, atol=1e-6)


OPTIONS: dict[Kind, dict[str, Any]] = {
    torch.optim.AdamW: {"lr": 0.02, "weight_decay": 0.1},
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adagrad: {"lr": 0.1},
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay and biases do not, but for the last layer, which comes later."""
    named = [(n, p) for n, p in model.named_parameters() if "last" not in n]
    return [
        {"params": [p for n, p in named if n.endswith("weight")]},
        {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.01},
    ]


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, first: int, last: int
) -> None:
    for step, batch in enumerate(batches(rank, size)):
        if not first <= step < last:
            continue
        if step == 1:
            late = [p for n, p in model.named_parameters() if "last" in n]
            optimizer.add_param_group({"params": late, "lr": 0.03})
        loss_of(model, batch).backward()
        finish(model)
        optimizer.step()
        model.zero_grad()


def begin(
    group: dist.ProcessGroup | None, wrap: Wrap, kind: Kind, last: int = 2
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and the optimizer's state after the first steps."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    torch.manual_seed(100 + rank)
    model = wrap(Large(), group)
    optimizer = optimizer_of_shards(groups_of(model), kind, **OPTIONS[kind])
    steps(model, optimizer, rank, size, 0, last)
    state = {n.removeprefix("module."): v.clone() for n, v in model.state_dict().items()}
    return state, optimizer.state_dict()


def go_on(
    group: dist.ProcessGroup | None,
    wrap: Wrap,
    kind: Kind,
    weights: dict[str, Tensor],
    state: dict[str, Any],
) -> dict[str, Tensor]:
    """Weights after the other steps, from the states that :func:`begin` saved."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    model = wrap(Large(), group)
    model.load_state_dict({f"module.{name}": value for name, value in weights.items()})
    late = [p for n, p in model.named_parameters() if "last" in n]
    groups = [*groups_of(model), {"params": late}]
    optimizer = optimizer_of_shards(groups, kind, **OPTIONS[kind])
    optimizer.load_state_dict(state)
    steps(model, optimizer, rank, size, 2, 4)
    return {n.removeprefix("module."): v.clone() for n, v in model.state_dict().items()}


def bare(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return zero_1(module, None)


@pytest.mark.parametrize("kind", list(OPTIONS))
@pytest.mark.parametrize("wrap", IN_PARTS)
def test_training_goes_on_at_another_world_size(wrap: Wrap, kind: Kind) -> None:
    """Groups of options, one added later; state as the whole optimizer has it."""
    bounds = {"rtol": 1e-4, "atol": 1e-5}
    half, state = begin(None, bare, kind)
    wanted, _ = begin(None, bare, kind, last=4)
    for found, found_state in on_ranks(2, begin, wrap, kind):
        assert_equal(found, half, **bounds)
        assert found_state["param_groups"] == state["param_groups"]
        assert found_state["state"].keys() == state["state"].keys()
        for number, values in state["state"].items():
            assert_equal(found_state["state"][number], values, **bounds)
    for weights in on_ranks(3, go_on, wrap, kind, found, found_state):
        assert_equal(weights, wanted, **bounds)
    # And without any of this.
    assert_equal(go_on(None, bare, kind, half, found_state), wanted, **bounds)


def small_steps(group: dist.ProcessGroup | None) -> tuple[str, list[float], str]:
    """A weight of one, less a ten-thousandth in each of four steps."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    model = FSDP(module, compute_dtype=torch.bfloat16, replicate_below=0, group=group)
    optimizer = optimizer_of_shards(model.parameters(), torch.optim.SGD, lr=1e-4)
    seen = []
    for _ in range(4):
        output = model(torch.ones(1, 1))
        seen.append(str(output.dtype))
        output.sum().backward()
        finish(model)
        optimizer.step()
        optimizer.zero_grad()
    (part,) = model.parameters()
    weight = dict(model.whole_parameters())["weight"]
    return seen[-1], [float(weight)], str(part.dtype)


def test_master_weights_keep_what_bfloat16_loses() -> None:
    for dtype, (weight,), master in [*on_ranks(2, small_steps), small_steps(None)]:
        assert (dtype, master) == ("torch.bfloat16", "torch.float32")
        assert weight == pytest.approx(1 - 4e-4, abs=1e-6)


def in_bfloat16(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return FSDP(module, compute_dtype=torch.bfloat16, replicate_below=WIDTH + 1, group=group)


@pytest.mark.parametrize("model", [Plain, Tied, Unused, Large])
def test_training_in_bfloat16_follows_float32(model: type[nn.Module]) -> None:
    run = Run(passes=2, autocast=True)
    for found in on_ranks(2, train_on_rank, in_bfloat16, model, run):
        for name, value in expected(model, Run()).items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], value, rtol=3e-2, atol=3e-2)


class Normed(Plain):
    """Autograd saves the norms' weights themselves, and of the layers' a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), layer) for layer in self.layers
        )


class Checkpointed(Normed):
    """Activations are made again in the backward pass, up to a block's end."""

    REENTRANT = False

    def forward(self, x: Tensor) -> Tensor:
        # Otherwise the first block's would not be, in one of the two ways.
        x = x.requires_grad_()
        with set_checkpoint_early_stop(False):
            for layer in self.layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.REENTRANT)) * self.scale
        return x


class Reentrant(Checkpointed):
    REENTRANT = True


def test_activations_made_again() -> None:
    wanted = expected(Normed, Run())
    for model in (Normed, Checkpointed, Reentrant):
        for found in on_ranks(2, train_on_rank, sharded, model, Run()):
            assert_equal(found, wanted, rtol=1e-5, atol=1e-6)


def looks_between(group: dist.ProcessGroup, wrap: Wrap, make: Any) -> dict[str, Tensor]:
    """As training without it: passes whose loss or gradients are thrown away."""
    rank = dist.get_rank(group)
    torch.manual_seed(100)
    model = wrap(Plain(), group)
    optimizer = make(model.parameters(), torch.optim.SGD, lr=0.05)
    for batch in batches(rank, group.size()):
        model(batch)
        with model.no_sync():  # type: ignore[operator]
            loss_of(model, batch).backward()
        model.zero_grad()
        loss = loss_of(model, batch)
        with torch.no_grad():
            assert torch.equal(loss, loss_of(model, batch))
        loss.backward()
        finish(model)
        with torch.no_grad():
            assert torch.equal(loss, loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert not torch.equal(loss, loss_of(model, batch))
    return {n.removeprefix("module."): v for n, v in model.state_dict().items()}


def without_hooks(params: Any, kind: Kind, **options: Any) -> torch.optim.Optimizer:
    return kind(params, **options)


@pytest.mark.parametrize("make", [optimizer_of_shards, without_hooks])
@pytest.mark.parametrize("wrap", IN_PARTS)
def test_forward_passes_besides(wrap: Wrap, make: Any) -> None:
    for found in on_ranks(2, looks_between, wrap, make):
        assert_equal(found, plain_sgd(Plain), rtol=1e-5, atol=1e-6)


def every_pass_finished(group: dist.ProcessGroup, wrap: Wrap) -> dict[str, Tensor]:
    """Gradients of two passes, each averaged, add up in the parts."""
    torch.manual_seed(100)
    model = wrap(Plain(), group)
    optimizer = optimizer_of_shards(model.parameters(), torch.optim.SGD, lr=0.05)
    for batch in batches(dist.get_rank(group), group.size()):
        for half in batch.chunk(2):
            (loss_of(model, half) / 2).backward()
            finish(model)
        optimizer.step()
        optimizer.zero_grad()
    return {n.removeprefix("module."): v for n, v in model.state_dict().items()}


@pytest.mark.parametrize("wrap", IN_PARTS)
def test_shards_accumulate(wrap: Wrap) -> None:
    for found in on_ranks(2, every_pass_finished, wrap):
        assert_equal(found, plain_sgd(Plain), rtol=1e-5, atol=1e-6)


def scaled(group: dist.ProcessGroup, wrap: Wrap, fused: bool) -> list[tuple[float, bool]]:
    """The scale after each step, and whether weights have changed; one gradient overflows."""
    model = wrap(Large(), group)
    scaler = AgreeingGradScaler("cpu", init_scale=2.0**8, growth_interval=100, group=group)
    optimizer = optimizer_of_shards(model.parameters(), torch.optim.AdamW, lr=0.1, fused=fused)
    found = []
    for step in range(3):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scaler.scale(loss_of(model, torch.ones(2, WIDTH))).backward()
        finish(model)
        held = [part for part in model.parameters() if part.numel()]
        if step == 1 and dist.get_rank(group) == 0:
            held[0].grad[0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = model.state_dict()
        found.append(
            (scaler.get_scale(), any(not torch.equal(after[name], before[name]) for name in before))
        )
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wrap", IN_PARTS)
def test_ranks_skip_a_step_together(wrap: Wrap, fused: bool) -> None:
    """A gradient is infinite in one rank's part; both halve the scale and do not step."""
    ranks = on_ranks(2, scaled, wrap, fused)
    assert ranks == [[(256.0, True), (128.0, False), (128.0, True)]] * 2
