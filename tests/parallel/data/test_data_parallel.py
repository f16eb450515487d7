"""Data parallelism on gloo ranks: training ends where one process with the whole batch would."""

from __future__ import annotations

import gc
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    IN_PARTS,
    MODELS,
    OWN,
    TINY_MB,
    WIDTH,
    Plain,
    Run,
    Strided,
    Tied,
    Unused,
    Wrap,
    assert_equal,
    bounds_of,
    bucketed,
    expected,
    flat,
    naive,
    overlapped,
    peer,
    train,
    train_on_rank,
)
from ranks import on_ranks
from strategy_training import case_of, train_case, train_case_on_rank
from torch import Tensor, nn

from parallel.data import BucketedDDP, NaiveDDP, Zero1, Zero2
from parallel.data.gradients import Averager, buckets_of


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


class TestStrategies:
    @pytest.mark.parametrize("name", STRATEGIES)
    def test_transformer_ends_where_one_process_does(self, name: str) -> None:
        case = case_of(f"parallel={name}", "parallel.dp=4", *OWN_OPTIONS.get(name, ()))
        wanted = train_case(case_of(), 0, 4)
        for found in on_ranks(4, train_case_on_rank, case):
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", ["ddp_torch", "zero_redundancy_torch"])
    def test_pytorchs_buckets_may_be_small_too(self, name: str) -> None:
        case = case_of(f"parallel={name}", "parallel.bucket_size_mb=0.01", "parallel.dp=4")
        assert case.parallel.bucket_size_mb == 0.01  # type: ignore[attr-defined]
        wanted = train_case(case_of(), 0, 4)
        for found in on_ranks(4, train_case_on_rank, case):
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        whole = [case_of(f"parallel={name}", f"parallel.bucket_size_mb={n}") for n in (3, 3.0)]
        assert whole[0].id == whole[1].id

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_one_rank(self, name: str) -> None:
        found = train_case(case_of(f"parallel={name}", "parallel.dp=1"), 0, 1)
        for got, want in zip(found, train_case(case_of(), 0, 1), strict=True):
            assert torch.equal(got, want)

    @pytest.mark.parametrize(
        "name", ["ddp_bucketed", "zero_1", "zero_2", "ddp_torch", "zero_redundancy_torch"]
    )
    @pytest.mark.parametrize(
        ("size", "words"),
        [
            ("0", "positive and finite"),
            ("-1", "positive and finite"),
            ("inf", "a finite number"),
            ("nan", "a finite number"),
        ],
    )
    def test_bucket_size_names_the_key(self, name: str, size: str, words: str) -> None:
        with pytest.raises(ValueError, match=rf"^parallel\.bucket_size_mb=.* must be {words}$"):
            case_of(f"parallel={name}", f"parallel.bucket_size_mb={size}")


def without_a_limit(group: dist.ProcessGroup, kind: type[nn.Module]) -> int:
    model = kind(Plain(), bucket_size_mb=None, group=group)
    return len(model._transfers)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [BucketedDDP, Zero1, Zero2])
def test_no_bucket_size_is_one_bucket(kind: type[nn.Module]) -> None:
    assert on_ranks(2, without_a_limit, kind) == [1, 1]
