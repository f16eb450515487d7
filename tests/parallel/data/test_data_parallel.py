"""Data parallelism on gloo ranks: training ends where one process with the whole batch would."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.tasks.batch import whole_batch
from kernels import BACKENDS
from models.transformer import Transformer, cross_entropy
from parallel.data import FSDP, BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP, Zero1, Zero2
from parallel.data.gradients import Averager, buckets_of

CPU = torch.device("cpu")
WIDTH, BATCH, STEPS = 8, 12, 4
TINY_MB = 300 / 2**20
"""A bucket that holds one weight matrix of the models below and a bias, but not two."""


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


class Tied(Plain):
    """One weight in two layers, whose gradient is the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight.requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)


class Unused(Plain):
    """The last layer is used by no rank, and the second one where the first number is positive."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        if x[0, 0] > 0:
            # Rows by themselves: a batch in one piece uses it for the same rows as its parts do.
            return first + self.layers[1](x) * (x[:, :1] > 0)
        return first


class TwoDtypes(Plain):
    """Parameters in bfloat16 between others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        return self.layers[2](self.layers[1](x.bfloat16()).float())


class Strided(Plain):
    """A convolution whose weight is laid out channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.convolution(image).sum((1, 2, 3)).unsqueeze(1) * super().forward(x)


class Large(Plain):
    """A weight that no number of ranks divides, nor the alignment of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 5 * WIDTH + 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


MODELS = [Plain, Tied, Frozen, Unused, TwoDtypes, Strided, Large]


def bucketed(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return BucketedDDP(module, TINY_MB, group=group)


def naive(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return NaiveDDP(module, group=group)


def flat(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return FlatDDP(module, group=group)


def overlapped(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return OverlappedDDP(module, group=group)


def zero_1(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return Zero1(module, TINY_MB, group=group)


def zero_2(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return Zero2(module, TINY_MB, group=group)


def fsdp(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Weights are sharded, biases whole on every rank."""
    return FSDP(module, replicate_below=WIDTH + 1, group=group)


def peer(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        module,
        process_group=group,
        gradient_as_bucket_view=True,
        find_unused_parameters=isinstance(module, Unused),
    )


Wrap = Callable[[nn.Module, dist.ProcessGroup | None], nn.Module]

OWN: list[Wrap] = [naive, flat, overlapped, bucketed]
IN_PARTS: list[Wrap] = [zero_1, zero_2, fsdp]
"""Containers whose ``parameters()`` are shards of the module's."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """How a model is trained."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    passes: int = 1
    """Backward passes to a step: all but the last without synchronisation."""
    set_to_none: bool = True
    autocast: bool = False


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def batches(rank: int, num_ranks: int) -> Iterator[Tensor]:
    """This rank's rows of the batch of every step; rank 0 of one has all."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        whole = torch.randn(BATCH, WIDTH, generator=generator)
        # The first half of the ranks has the sign that Unused looks at, and one process sees it.
        whole[: BATCH // 2, 0] = whole[: BATCH // 2, 0].abs()
        whole[BATCH // 2 :, 0] = -whole[BATCH // 2 :, 0].abs()
        yield whole.chunk(num_ranks)[rank]


def train(model: nn.Module, run: Run, rank: int = 0, num_ranks: int = 1) -> dict[str, Tensor]:
    """Parameters and buffers after some steps on this rank's rows."""
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"momentum": 0.9} if run.optimizer is torch.optim.SGD else {"weight_decay": 0.1}
    optimizer = run.optimizer(trained, lr=0.05, **options)
    for batch in batches(rank, num_ranks):
        parts = batch.chunk(run.passes)
        for index, part in enumerate(parts):
            waits = no_sync(model) if index + 1 < len(parts) else contextlib.nullcontext()
            with waits, torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
                (model(part).float().square().mean() / len(parts)).backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad(set_to_none=run.set_to_none)
    state = model.state_dict()
    return {name.removeprefix("module."): value.clone() for name, value in state.items()}


def train_on_rank(
    group: dist.ProcessGroup, wrap: Wrap, model: type[nn.Module], run: Run
) -> dict[str, Tensor]:
    rank = dist.get_rank(group)
    # Replicas differ until they are wrapped.
    torch.manual_seed(100 + rank)
    return train(wrap(model(), group), run, rank, group.size())


def expected(model: type[nn.Module], run: Run) -> dict[str, Tensor]:
    torch.manual_seed(100)
    return train(model(), run)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], **bounds: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, n=name: n + text, **bounds)


def bounds_of(model: type[nn.Module], run: Run) -> dict[str, float]:
    if model is TwoDtypes or run.autocast:
        # Gradients of halves of the batch are rounded to eight bits before they are summed.
        return {"rtol": 2e-2, "atol": 2e-2}
    return {"rtol": 1e-5, "atol": 1e-6}


class TestWeightsAreThoseOfOneProcess:
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize("wrap", [*OWN, *IN_PARTS, peer])
    def test_every_model(self, wrap: Wrap, model: type[nn.Module]) -> None:
        run = Run()
        wanted = expected(model, run)
        ranks = on_ranks(2, train_on_rank, wrap, model, run)
        for found in ranks:
            assert_equal(found, wanted, **bounds_of(model, run))
        assert_equal(ranks[0], ranks[1], rtol=0, atol=0)

    @pytest.mark.parametrize(
        "run",
        [
            Run(optimizer=torch.optim.AdamW),
            Run(set_to_none=False),
            Run(passes=3),
            Run(passes=3, set_to_none=False),
            Run(autocast=True),
        ],
        ids=["adamw", "zeroed", "accumulated", "accumulated, zeroed", "autocast"],
    )
    @pytest.mark.parametrize("model", [Tied, Unused])
    @pytest.mark.parametrize("wrap", [*OWN, *IN_PARTS])
    def test_every_way_to_train(self, wrap: Wrap, model: type[nn.Module], run: Run) -> None:
        wanted = expected(model, run)
        for found in on_ranks(2, train_on_rank, wrap, model, run):
            assert_equal(found, wanted, **bounds_of(model, run))

    @pytest.mark.parametrize("wrap", [*OWN, *IN_PARTS])
    def test_three_and_four_ranks(self, wrap: Wrap) -> None:
        run = Run(optimizer=torch.optim.AdamW)
        wanted = expected(Unused, run)
        for num_ranks in (3, 4):
            for found in on_ranks(num_ranks, train_on_rank, wrap, Plain, run):
                assert_equal(found, expected(Plain, run), rtol=1e-5, atol=1e-5)
        for found in on_ranks(4, train_on_rank, wrap, Unused, run):
            assert_equal(found, wanted, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("wrap", [*OWN, *IN_PARTS])
    def test_one_rank_needs_no_process_group(self, wrap: Wrap) -> None:
        run = Run(passes=2)
        torch.manual_seed(100)
        assert_equal(train(wrap(Plain(), None), run), expected(Plain, run), rtol=0, atol=0)


def halves_are_exact(group: dist.ProcessGroup, wrap: Wrap) -> bool:
    """Gradients of integers, whose sums and halves float32 holds exactly."""
    rank = dist.get_rank(group)
    model = wrap(nn.Linear(4, 1, bias=False), group)
    inputs = torch.arange(8.0).view(2, 4)
    model(inputs[rank]).sum().backward()
    model.finish_gradient_synchronization()  # type: ignore[operator]
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return torch.equal(parameter.grad, inputs.mean(0, keepdim=True))


@pytest.mark.parametrize("wrap", OWN)
def test_averages_are_exact_where_the_arithmetic_is(wrap: Wrap) -> None:
    assert on_ranks(2, halves_are_exact, wrap) == [True, True]


def gradients_of_unused(group: dist.ProcessGroup, wrap: Wrap) -> list[bool]:
    rank = dist.get_rank(group)
    model = wrap(Unused(), group)
    sign = 1.0 if rank == 0 else -1.0
    model(torch.full((2, WIDTH), sign)).sum().backward()
    model.finish_gradient_synchronization()  # type: ignore[operator]
    return [p.grad is None for p in model.parameters()]


@pytest.mark.parametrize("wrap", OWN)
def test_only_what_no_rank_used_has_no_gradient(wrap: Wrap) -> None:
    """Weight and bias of the layers that all ranks, one rank and no rank used."""
    none = [False, False, False, False, True, True]
    assert on_ranks(2, gradients_of_unused, wrap) == [none, none]


def count_calls(group: dist.ProcessGroup, wrap: Wrap) -> tuple[int, int]:
    """All-reduces of gradients that were started before the first layer's backward, and in all."""
    started: list[Tensor] = []
    before_first: list[int] = []
    original = Averager.start

    def counting(averager: Averager, tensor: Tensor) -> dist.Work:
        started.append(tensor)
        return original(averager, tensor)

    torch.manual_seed(1)
    module = Plain()
    module.layers[0].register_forward_hook(
        lambda _, inputs, output: (
            output.register_hook(lambda _: before_first.append(len(started))) and None
        )
    )
    model = wrap(module, group)
    with mock.patch.object(Averager, "start", counting):
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish_gradient_synchronization()  # type: ignore[operator]
    return before_first[0], len(started)


@pytest.mark.parametrize(
    ("wrap", "calls"), [(naive, (0, 6)), (flat, (0, 1)), (overlapped, (4, 6)), (bucketed, (2, 3))]
)
def test_how_many_calls_and_when(wrap: Wrap, calls: tuple[int, int]) -> None:
    """Three layers of a weight and a bias; a bucket holds one layer."""
    assert on_ranks(2, count_calls, wrap) == [calls, calls]


def gradients_stay_in_buckets(group: dist.ProcessGroup, set_to_none: bool) -> list[bool]:
    model = BucketedDDP(Plain(), group=group)
    places = []
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish_gradient_synchronization()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        storages = {g.untyped_storage().data_ptr() for g in gradients}
        places.append((len(storages), storages.pop()))
        model.zero_grad(set_to_none=set_to_none)
    return [count == 1 and place == places[0][1] for count, place in places]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_one_bucket_throughout(set_to_none: bool) -> None:
    assert on_ranks(2, gradients_stay_in_buckets, set_to_none) == [[True] * 3] * 2


def gradient_is_copied(group: dist.ProcessGroup, bucket_size_mb: float) -> list[bool]:
    """Whether the averaged gradients of weight and bias are copies of those that autograd made."""
    made: list[int] = []
    module = nn.Linear(8, 8)
    model = BucketedDDP(module, bucket_size_mb, group=group)
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_synchronization()
    assert len(made) == 2
    return [p.grad is not None and p.grad.data_ptr() not in made for p in module.parameters()]


def test_one_gradient_that_fills_a_bucket_stays_where_it_is() -> None:
    assert on_ranks(2, gradient_is_copied, TINY_MB / 100) == [[False, False]] * 2
    assert on_ranks(2, gradient_is_copied, 1.0) == [[True, True]] * 2


def gradients_outlive_zero_grad(group: dist.ProcessGroup, wrap: Wrap) -> int:
    module = nn.Linear(8, 8)
    model = wrap(module, group)
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_synchronization()  # type: ignore[operator]
    gradients = [weakref.ref(p.grad) for p in module.parameters()]
    model.zero_grad(set_to_none=True)
    # A thread of gloo's may let go a moment after its work has ended; a container keeps for good.
    deadline = time.monotonic() + 60
    while any(gradient() is not None for gradient in gradients) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sum(gradient() is not None for gradient in gradients)


@pytest.mark.parametrize("wrap", [naive, overlapped])
def test_gradients_outside_of_buckets_go_when_they_are_zeroed(wrap: Wrap) -> None:
    """Their memory is the next forward pass's."""
    assert on_ranks(2, gradients_outlive_zero_grad, wrap) == [0, 0]


def layouts_agree(group: dist.ProcessGroup, wrap: Wrap) -> bool:
    model = wrap(Strided(), group)
    model(torch.ones(2, WIDTH)).sum().backward()
    model.finish_gradient_synchronization()  # type: ignore[operator]
    return all(p.grad is not None and p.grad.stride() == p.stride() for p in model.parameters())


@pytest.mark.parametrize("wrap", OWN)
def test_gradients_are_laid_out_as_their_parameters(wrap: Wrap) -> None:
    """Fused optimizers ask for it."""
    assert on_ranks(2, layouts_agree, wrap) == [True, True]


class TestBuckets:
    def parameters(self, *sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]

    def sizes(self, parameters: list[nn.Parameter], max_bytes: float) -> list[list[int]]:
        found = buckets_of(parameters, max_bytes)
        return [[p.numel() for p in bucket.parameters] for bucket in found]

    def test_at_most_so_many_bytes(self) -> None:
        """Four bytes an element, by hand."""
        parameters = self.parameters(5, 5, 1, 30, 9, 1)
        assert self.sizes(parameters, 40) == [[5, 5], [1], [30], [9, 1]]
        assert self.sizes(parameters, float("inf")) == [[5, 5, 1, 30, 9, 1]]

    def test_one_dtype_each(self) -> None:
        floats, halves = self.parameters(5, 6), self.parameters(7, 8, dtype=torch.bfloat16)
        mixed = [floats[0], halves[0], floats[1], halves[1]]
        assert self.sizes(mixed, 44) == [[5, 6], [7, 8]]
        # 15 elements of two bytes fit into 40 bytes, 11 of four do not.
        assert self.sizes(mixed, 40) == [[5], [7, 8], [6]]


def second_backward(group: dist.ProcessGroup) -> str:
    model = BucketedDDP(nn.Linear(4, 1), group=group)
    model(torch.ones(4)).sum().backward()
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(4)).sum().backward()
    model.finish_gradient_synchronization()
    return str(error.value)


class TestBadInput:
    @pytest.mark.parametrize("size", [0, -1, float("inf"), float("nan")])
    def test_bucket_size(self, size: float) -> None:
        with pytest.raises(ValueError, match=r"^bucket_size_mb=.*: must be positive and finite$"):
            BucketedDDP(Plain(), size)

    @pytest.mark.parametrize("wrap", OWN)
    @pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
    def test_nothing_trains(self, wrap: Wrap, module: nn.Module) -> None:
        with pytest.raises(ValueError, match=r"^the module has no parameter that requires grad"):
            wrap(module, None)

    def test_devices(self) -> None:
        split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with pytest.raises(ValueError, match=r"^1.weight is on meta and 0.weight on cpu: move"):
            NaiveDDP(split)
        with pytest.raises(ValueError, match=r"^weight is on the meta device: give"):
            NaiveDDP(nn.Linear(2, 2, device="meta"))

    def test_a_second_backward_pass_is_told_of_no_sync(self) -> None:
        for message in on_ranks(2, second_backward):
            assert "no_sync()" in message
            assert "\n" not in message


def forgets(group: dist.ProcessGroup, wrap: Wrap) -> bool:
    module = Plain()
    container = wrap(module, group)
    gone = weakref.ref(container)
    del container
    gc.collect()
    module(torch.ones(2, WIDTH)).sum().backward()
    return gone() is None


@pytest.mark.parametrize("wrap", OWN)
def test_hooks_do_not_keep_a_container_alive(wrap: Wrap) -> None:
    assert on_ranks(2, forgets, wrap) == [True, True]


STRATEGIES = [
    *("ddp_naive", "ddp_flat", "ddp_overlapped", "ddp_bucketed", "ddp_torch"),
    *("zero_1", "zero_2", "fsdp", "fsdp_torch"),
]

OWN_OPTIONS = {"fsdp": ("parallel.replicate_below=40",)}
"""So small that matrices are divided, and norms are not."""

CASE = (
    *("model=tiny", "model.num_layers=2", "model.d_model=32", "model.d_ff=48"),
    *("model.num_heads=4", "model.vocab_size=23", "batch_size=2", "seq_len=12", "device=cpu"),
    *("attention=naive",),
)


def case_of(*arguments: str) -> Case:
    (case,) = compose_request([*CASE, *arguments]).cases
    return case


def train_case(case: Case, first_batch: int, num_batches: int) -> list[Tensor]:
    """Weights of the transformer after AdamW steps through the strategy."""
    assert case.model is not None
    torch.manual_seed(5)
    module = Transformer(case.model, BACKENDS["naive"].target(name="naive"))
    model = case.parallel.wrap(module)
    optimizer = case.parallel.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for _ in range(3):
        for index in range(first_batch, first_batch + num_batches):
            batch = whole_batch(case, CPU, index)
            logits = model(batch.tokens, batch.positions)
            (cross_entropy(logits, batch.targets) / num_batches).backward()
        case.parallel.after_backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model, module)


def weights_of(model: nn.Module, module: nn.Module) -> list[Tensor]:
    """Whole parameters of a module that a strategy has wrapped."""
    if isinstance(model, FSDP):
        whole = dict(model.whole_parameters())
        return [whole[name].detach().clone() for name, _ in module.named_parameters()]
    if isinstance(model, Zero1 | Zero2):
        model.wait_for_parameters()
    found = [p.detach() for p in module.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in found]


def train_case_on_rank(group: dist.ProcessGroup, case: Case) -> list[Tensor]:
    return train_case(case, dist.get_rank(), 1)


class TestStrategies:
    @pytest.mark.parametrize("name", STRATEGIES)
    def test_transformer_ends_where_one_process_does(self, name: str) -> None:
        case = case_of(f"parallel={name}", "parallel.dp=4", *OWN_OPTIONS.get(name, ()))
        wanted = train_case(case_of(), 0, 4)
        for found in on_ranks(4, train_case_on_rank, case):
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_one_rank(self, name: str) -> None:
        found = train_case(case_of(f"parallel={name}", "parallel.dp=1"), 0, 1)
        for got, want in zip(found, train_case(case_of(), 0, 1), strict=True):
            assert torch.equal(got, want)

    @pytest.mark.parametrize("name", ["ddp_bucketed", "zero_1", "zero_2"])
    @pytest.mark.parametrize("size", ["0", "-1", "inf", "nan"])
    def test_bucket_size_names_the_key(self, name: str, size: str) -> None:
        with pytest.raises(ValueError, match=r"^parallel\.bucket_size_mb=.*positive and finite$"):
            case_of(f"parallel={name}", f"parallel.bucket_size_mb={size}")
