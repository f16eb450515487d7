"""ZeRO and FSDP on gloo ranks: who holds what, when it travels, and that state outlives ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_data_parallel import (
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
    case_of,
    expected,
    fsdp,
    train_on_rank,
    zero_1,
    zero_2,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from parallel import STRATEGIES
from parallel.data_parallel import (
    FSDP,
    AgreeingGradScaler,
    Zero1,
    Zero2,
    fsdp_weights,
    optimizer_of_parts,
    zero,
)
from parallel.data_parallel.blocks import blocks_of, parameters_of_blocks
from parallel.data_parallel.flat import ALIGNMENT, Averaging, FlatLayout, start_all_gather
from parallel.data_parallel.parts import PartAverage

Kind = type[torch.optim.Optimizer]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def finish(model: nn.Module) -> None:
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


class TestLayout:
    def test_by_hand(self) -> None:
        """70, 3 and 100 elements: 128 + 64 + 128 with alignment, in three parts of 128."""
        layout = FlatLayout([torch.zeros(7, 10), torch.zeros(3), torch.zeros(100)], 3)
        assert ALIGNMENT == 64
        assert (layout.offsets, layout.part_size, layout.size) == ([0, 128, 192], 128, 384)
        held = [[layout.held(place, part) for part in range(3)] for place in range(3)]
        assert held == [
            [(0, 70), (70, 70), (70, 70)],
            [(0, 0), (0, 3), (3, 3)],
            [(0, 0), (0, 64), (64, 100)],
        ]

    @pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
    def test_parts_make_up_the_whole(self, num_parts: int) -> None:
        """In memory order, of tensors of which one is transposed and one a scalar."""
        tensors = [torch.randn(9, 30).t(), torch.randn(()), torch.randn(301)]
        layout = FlatLayout(tensors, num_parts)
        buffer = torch.zeros(layout.size)
        for view, tensor in zip(layout.views(buffer), tensors, strict=True):
            assert view.stride() == tensor.stride()
            view.copy_(tensor)
        cut = [layout.slices(layout.part(buffer, n), n) for n in range(num_parts)]
        for place, tensor in enumerate(tensors):
            joined = torch.cat([slices[place] for slices in cut])
            assert torch.equal(joined.as_strided(tensor.shape, tensor.stride()), tensor)


class TestBlocks:
    def test_outermost_lists(self) -> None:
        inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        lists = nn.ModuleList([nn.ModuleList([inner]), nn.Linear(2, 2)])
        model = nn.ModuleDict({"first": nn.Linear(2, 2), "rest": lists})
        assert blocks_of(model) == [inner, lists[1]]
        assert blocks_of(nn.Linear(2, 2)) == []

    def test_what_is_shared_is_outside(self) -> None:
        model = Tied()
        inside, outside = parameters_of_blocks(model, list(model.layers))
        weights, biases = [m.weight for m in model.layers], [m.bias for m in model.layers]
        assert [list(map(id, members)) for members in inside] == [
            [id(biases[0])],
            [id(weights[1]), id(biases[1])],
            [id(biases[2])],
        ]
        assert list(map(id, outside)) == [id(weights[0])]

    def test_bad_input(self) -> None:
        model = Plain()
        with pytest.raises(ValueError, match=r"^blocks\[1\] is not in the module"):
            parameters_of_blocks(model, [model.layers[0], nn.ReLU()])
        with pytest.raises(ValueError, match=r"^blocks\[1\] is in blocks\[0\]: give blocks that"):
            parameters_of_blocks(model, [model.layers, model.layers[1]])


@pytest.mark.parametrize("model", [Plain, Tied, Large])
@pytest.mark.parametrize("run", [Run(), Run(passes=2)], ids=["plain", "accumulated"])
def test_bit_for_bit_as_all_reduce(model: type[nn.Module], run: Run) -> None:
    """Two ranks' gradients have one sum, in whichever pieces it is computed."""
    wanted = on_ranks(2, train_on_rank, bucketed, model, run)[0]
    for wrap in IN_PARTS:
        for found in on_ranks(2, train_on_rank, wrap, model, run):
            assert_equal(found, wanted, rtol=0, atol=0)


def shares(group: dist.ProcessGroup, wrap: Wrap) -> dict[str, int]:
    """Elements that a rank holds of a model, after a step of AdamW."""
    model = wrap(Large(), group)
    optimizer = optimizer_of_parts(model.parameters(), torch.optim.AdamW, lr=0.1)
    loss_of(model, torch.ones(2, WIDTH)).backward()
    finish(model)
    whole = [p.grad for p in model.module.parameters() if p.grad is not None]
    gradients = {
        part.grad.untyped_storage().data_ptr(): part.grad.untyped_storage().nbytes() // 4
        for part in model.parameters()
        if part.grad is not None
    }
    optimizer.step()
    return {
        "whole gradients": len(whole),
        "parts": sum(p.numel() for p in model.parameters()),
        "gradients": sum(gradients.values()),
        "state": sum(s["exp_avg"].numel() for s in optimizer.state.values()),
        "parameters": sum(p.numel() for p in model.module.parameters()),
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
                assert found["parameters"] == 603
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
    # Of the first two blocks, and of what is outside.
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
        reduce = noting("reduce", Averaging.start)
        patches.enter_context(mock.patch.object(Averaging, "start", reduce))
        for module in (zero, fsdp_weights):
            gather = noting("gather", start_all_gather)
            patches.enter_context(mock.patch.object(module, "start_all_gather", gather))
        yield


def sequence(group: dist.ProcessGroup, wrap: Wrap, model_of: type[nn.Module]) -> list[str]:
    """What happens in a step, in its order; blocks by their numbers."""
    events: list[str] = []
    module = model_of()
    model = wrap(module, group)
    for number, layer in enumerate(module.layers):

        def note(_: nn.Module, __: Any, output: Tensor, number: int = number) -> None:
            events.append(f"forward {number}")
            output.register_hook(lambda _: events.append(f"backward {number}"))

        layer.register_forward_hook(note)
    optimizer = optimizer_of_parts(model.parameters(), torch.optim.SGD, lr=0.1)
    sign = 1.0 if dist.get_rank(group) == 0 else -1.0
    with recorded(events):
        loss_of(model, torch.full((2, WIDTH), sign)).backward()
        finish(model)
        events.append("step")
        optimizer.step()
    return events


def test_zero_reduces_in_backward_and_gathers_after_the_step() -> None:
    """Three buckets of a layer each; the first one's gradients are there when backward ends."""
    wanted = [
        *("forward 0", "forward 1", "forward 2"),
        *("backward 2", "reduce", "backward 1", "reduce", "backward 0", "reduce"),
        *("step", "gather", "gather", "gather"),
    ]
    for wrap in (zero_1, zero_2):
        assert on_ranks(2, sequence, wrap, Plain) == [wanted, wanted]


def sharded(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return FSDP(module, replicate_below=0, group=group)


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
    start = PartAverage.start

    def counting(item: PartAverage, group: dist.ProcessGroup) -> None:
        start(item, group)
        counts.append(sum(other._transfer is not None for other in model._averaged))

    PartAverage.start = counting  # type: ignore[method-assign]
    try:
        loss_of(model, torch.ones(2, WIDTH)).backward()
        finish(model)
    finally:
        PartAverage.start = start  # type: ignore[method-assign]
    assert len(counts) == 7
    return max(counts)


@pytest.mark.parametrize(("wrap", "most"), [(zero_2, 4), (sharded, 1)])
def test_few_whole_gradients_are_there_at_once(wrap: Wrap, most: int) -> None:
    assert on_ranks(2, most_in_flight, wrap) == [most, most]


def whole_gradients_left(group: dist.ProcessGroup, wrap: Wrap) -> tuple[int, int]:
    """Buffers of whole gradients that there were, and that are there while the optimizer steps."""
    model = wrap(Deep(), group)
    make, buffers = PartAverage._make_buffer, []

    def noting(average: PartAverage) -> Tensor:
        buffer = make(average)
        buffers.append(weakref.ref(buffer))
        return buffer

    with mock.patch.object(PartAverage, "_make_buffer", noting):
        loss_of(model, torch.ones(2, WIDTH)).backward()
        finish(model)
    return len(buffers), sum(buffer() is not None for buffer in buffers)


@pytest.mark.parametrize("wrap", [zero_2, sharded])
def test_no_whole_gradient_is_left_for_the_step(wrap: Wrap) -> None:
    assert on_ranks(2, whole_gradients_left, wrap) == [(7, 0), (7, 0)]


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
        optimizer = optimizer_of_parts(container.parameters(), torch.optim.SGD, lr=0.05)
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
    optimizer = optimizer_of_parts(groups_of(model), kind, **OPTIONS[kind])
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
    """Weights after the other steps, from what :func:`begin` has left."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    model = wrap(Large(), group)
    model.load_state_dict({f"module.{name}": value for name, value in weights.items()})
    late = [p for n, p in model.named_parameters() if "last" in n]
    groups = [*groups_of(model), {"params": late}]
    optimizer = optimizer_of_parts(groups, kind, **OPTIONS[kind])
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
    optimizer = optimizer_of_parts(model.parameters(), torch.optim.SGD, lr=1e-4)
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
        # Else the first block's would not be, in one of the two ways.
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


@pytest.mark.parametrize("make", [optimizer_of_parts, without_hooks])
@pytest.mark.parametrize("wrap", IN_PARTS)
def test_forward_passes_besides(wrap: Wrap, make: Any) -> None:
    for found in on_ranks(2, looks_between, wrap, make):
        assert_equal(found, plain_sgd(Plain), rtol=1e-5, atol=1e-6)


def every_pass_finished(group: dist.ProcessGroup, wrap: Wrap) -> dict[str, Tensor]:
    """Gradients of two passes, each averaged, add up in the parts."""
    torch.manual_seed(100)
    model = wrap(Plain(), group)
    optimizer = optimizer_of_parts(model.parameters(), torch.optim.SGD, lr=0.05)
    for batch in batches(dist.get_rank(group), group.size()):
        for half in batch.chunk(2):
            (loss_of(model, half) / 2).backward()
            finish(model)
        optimizer.step()
        optimizer.zero_grad()
    return {n.removeprefix("module."): v for n, v in model.state_dict().items()}


@pytest.mark.parametrize("wrap", IN_PARTS)
def test_parts_accumulate(wrap: Wrap) -> None:
    for found in on_ranks(2, every_pass_finished, wrap):
        assert_equal(found, plain_sgd(Plain), rtol=1e-5, atol=1e-6)


def scaled(group: dist.ProcessGroup, wrap: Wrap, fused: bool) -> list[tuple[float, bool]]:
    """The scale after each step, and whether weights have changed; one gradient overflows."""
    model = wrap(Large(), group)
    scaler = AgreeingGradScaler("cpu", init_scale=2.0**8, growth_interval=100, group=group)
    optimizer = optimizer_of_parts(model.parameters(), torch.optim.AdamW, lr=0.1, fused=fused)
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


class Recurrent(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def out_of_order(group: dist.ProcessGroup) -> str:
    model = FSDP(Recurrent(), replicate_below=0, group=group)
    with pytest.raises(RuntimeError) as error:
        loss_of(model, torch.ones(2, WIDTH)).backward()
    return str(error.value)


def as_a_whole(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return FSDP(module, blocks=[], replicate_below=0, group=group)


class TestOrderOfBlocks:
    def test_a_block_that_runs_again_is_an_error(self) -> None:
        for message in on_ranks(2, out_of_order):
            assert message.startswith("a gradient of a block came after")
            assert "\n" not in message

    def test_without_blocks_it_trains(self) -> None:
        for found in on_ranks(2, train_on_rank, as_a_whole, Recurrent, Run()):
            assert_equal(found, expected(Recurrent, Run()), rtol=1e-5, atol=1e-6)


def wrong_state(group: dist.ProcessGroup) -> list[str]:
    model = fsdp(Plain(), group)
    state = model.state_dict()
    messages = []
    for changed in (
        {name: value for name, value in state.items() if name != "module.layers.1.weight"},
        {**state, "module.other": torch.zeros(1)},
    ):
        with pytest.raises(ValueError, match=r"^the state has") as error:
            model.load_state_dict(changed)
        messages.append(str(error.value))
    return messages


class TestBadInput:
    @pytest.mark.parametrize("wrap", IN_PARTS)
    def test_sharded_already(self, wrap: Wrap) -> None:
        module = Plain()
        module.layers[0].weight.device_mesh = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"^layers.0.weight is a DTensor, sharded already"):
            wrap(module, None)

    @pytest.mark.parametrize("wrap", IN_PARTS)
    @pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
    def test_nothing_trains(self, wrap: Wrap, module: nn.Module) -> None:
        with pytest.raises(ValueError, match=r"^the module has no parameter that requires grad"):
            wrap(module, None)

    @pytest.mark.parametrize("wrap", IN_PARTS)
    def test_devices(self, wrap: Wrap) -> None:
        split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with pytest.raises(ValueError, match=r"^1.weight is on meta and 0.weight on cpu: move"):
            wrap(split, None)

    @pytest.mark.parametrize("size", [0, -1, float("inf"), float("nan")])
    def test_bucket_size(self, size: float) -> None:
        with pytest.raises(ValueError, match=r"^bucket_size_mb=.*: must be positive and finite$"):
            Zero1(Plain(), size)

    def test_replicate_below(self) -> None:
        with pytest.raises(ValueError, match=r"^replicate_below=-1: must be at least 0$"):
            FSDP(Plain(), replicate_below=-1)

    @pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
    def test_optimizers_of_whole_parameters(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"^{name} does not update each element by itself"):
            optimizer_of_parts(Plain().parameters(), getattr(torch.optim, name))

    def test_no_parameters(self) -> None:
        with pytest.raises(ValueError, match=r"^optimizer got an empty parameter list$"):
            optimizer_of_parts([], torch.optim.AdamW)

    def test_state_of_another_model(self) -> None:
        for messages in on_ranks(2, wrong_state):
            assert messages == [
                "the state has no module.layers.1.weight: give that of the same model",
                "the state has module.other, which the model has not",
            ]

    def test_keys(self) -> None:
        with pytest.raises(ValueError, match=r"^parallel\.compute_dtype=int8: must be null or one"):
            case_of("parallel=fsdp", "parallel.compute_dtype=int8")
        with pytest.raises(ValueError, match=r"^parallel\.replicate_below=-1: must be at least 0"):
            case_of("parallel=fsdp", "parallel.replicate_below=-1")
        with pytest.raises(ValueError, match=r"^parallel\.compute_dtype=bfloat16: PyTorch's fully"):
            case_of("parallel=fsdp_torch", "parallel.dp=1", "parallel.compute_dtype=bfloat16")


@pytest.mark.parametrize(
    ("name", "shares_of"),
    [
        ("zero_1", (1, 1, 0.25)),
        ("zero_2", (1, 0.25, 0.25)),
        ("fsdp", (0.25, 0.25, 0.25)),
        ("fsdp_torch", (0.25, 0.25, 0.25)),
        ("ddp_bucketed", (1, 1, 1)),
    ],
)
def test_shares_of_a_rank(name: str, shares_of: tuple[float, float, float]) -> None:
    found = case_of(f"parallel={name}", "parallel.dp=4").parallel
    assert (found.parameter_share, found.gradient_share, found.optimizer_state_share) == shares_of


def test_a_name_that_ends_in_a_number_is_kept_apart_from_the_ranks() -> None:
    assert "-zero_1x2-" in case_of("parallel=zero_1", "parallel.dp=2").slug
    assert "-fsdp2-" in case_of("parallel=fsdp", "parallel.dp=2").slug


def under_way(group: dist.ProcessGroup, name: str) -> list[bool]:
    """Whether a gathering is, after a step and after the task is done with the model."""
    model = {"zero_1": Zero1, "zero_2": Zero2}[name](nn.Linear(8, 8), group=group)
    optimizer = optimizer_of_parts(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    found = []
    for _ in range(2):
        found.append(any(bucket._gathering is not None for bucket in model._buckets))
        STRATEGIES[name].target(name=name).finish(model)
    return found


@pytest.mark.parametrize("name", ["zero_1", "zero_2"])
def test_a_task_ends_when_the_last_gathering_has(name: str) -> None:
    assert on_ranks(2, under_way, name) == [[True, False]] * 2
