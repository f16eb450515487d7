"""The compiled autograd node over the kernels for any GPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_kernels import Callbacks, EmulatedGpu, emulate_any_gpu
from native_node import run
from torch import Tensor

from kernels.flash import flash_attention, native
from kernels.flash.any_gpu import launch as any_gpu
from kernels.flash.call.arguments import FlashOptions
from kernels.launching.prepared import PlannedPass

pytestmark = pytest.mark.skipif(not any_gpu.INTERPRETED, reason="runs under Triton's interpreter")

WHOLE = ["forward", "row_terms", "backward_dkv", "backward_dq"]
IN_CHUNKS = ["forward", "merge", "row_terms", "backward_dkv", "sum", "backward_dq", "sum"]

Emulate = Callable[[int], EmulatedGpu]


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, FlashOptions]]:
    """Of each backward pass that the node leaves to Python whether it has a rest, and options."""
    passes = []
    backward = native._backward

    def counted(*arguments: Any) -> Any:
        passes.append((arguments[6] is not None, native._OPTIONS[arguments[9]]))
        return backward(*arguments)

    monkeypatch.setattr(native, "_backward", counted)
    return passes


@pytest.fixture
def emulated(
    native_module: Any, monkeypatch: pytest.MonkeyPatch, by_python: list[Any]
) -> Iterator[Emulate]:
    """A GPU of so many multiprocessors, and a node that has learnt nothing yet."""
    monkeypatch.setattr(native, "build", lambda folder: native_module)
    monkeypatch.setattr(native._Node, "module", None)
    monkeypatch.setattr(native._Node, "reason", None)
    kept = []

    def start(multiprocessors: int) -> EmulatedGpu:
        gpu = emulate_any_gpu(monkeypatch, multiprocessors)
        # The node calls them by address.
        kept.append(Callbacks(gpu))
        monkeypatch.setattr(native, "_addresses", lambda: kept[-1].addresses)
        return gpu

    yield start
    native_module.forget()


def inputs(
    heads: int = 1, kv_heads: int = 1, q_len: int = 100, kv_len: int = 100, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, which require gradients, and do, as a transformer stores them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (
        torch.randn(2, length, n, 16, generator=generator).transpose(1, 2)
        for n, length in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len))
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def num_native(call: Callable[[], Any]) -> int:
    before = native.num_calls()
    call()
    return native.num_calls() - before


@pytest.mark.parametrize(
    ("multiprocessors", "launches"), [(1, WHOLE), (400, IN_CHUNKS)], ids=["whole", "in chunks"]
)
@pytest.mark.parametrize("causal", [True, False])
# Rows that are no multiple of 16 bytes in float32, and grouped queries.
@pytest.mark.parametrize("shape", [(1, 1, 129, 129), (2, 1, 130, 140)])
def test_it_gives_the_bits_that_python_gives(
    emulated: Emulate,
    by_python: list[Any],
    multiprocessors: int,
    launches: list[str],
    causal: bool,
    shape: tuple[int, int, int, int],
) -> None:
    gpu = emulated(multiprocessors)
    run(*inputs(*shape), causal=causal)
    for seed in (1, 2):
        given = inputs(*shape, seed=seed)
        expected = run(*given, causal=causal, scale=0.3, autograd="python")
        gpu.launches.clear()
        by_triton = sum(kernel.by_triton for kernel in gpu.kernels.values())
        before = native.num_calls()
        got = run(*given, causal=causal, scale=0.3)
        assert native.num_calls() == before + 1
        assert sum(kernel.by_triton for kernel in gpu.kernels.values()) == by_triton
        assert gpu.launches == launches
        assert all(map(torch.equal, got, expected))
    assert not by_python


@pytest.mark.parametrize("scale", [1, 2])
def test_a_scale_without_a_fraction(emulated: Emulate, by_python: list[Any], scale: int) -> None:
    """Which Triton would compile in, or pass as an integer."""
    emulated(1)
    for seed in range(3):
        given = inputs(q_len=64, kv_len=64, seed=seed)
        got = run(*given, causal=True, scale=scale)
        expected = run(*given, causal=True, scale=float(scale), autograd="python")
        assert all(map(torch.equal, got, expected))
    assert not by_python


def test_a_hook_that_gives_back_another_o(emulated: Emulate) -> None:
    """Its launches are of that o's layout, and not those of later calls."""
    emulated(1)
    for seed in range(3):
        q, k, v, do = inputs(2, 2, 70, 70, seed=seed)
        expected = run(q, k, v, do, causal=True, autograd="python")
        count = 0

        def unpack(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            # The fourth of q, k, v, o, lse and rest.
            return x.contiguous() if count % 6 == 4 else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            o = flash_attention(q, k, v, causal=True)
            got = (o.detach(), *torch.autograd.grad(o, (q, k, v), do))
        assert count == 6
        assert all(map(torch.equal, got, expected))
        assert all(map(torch.equal, run(q, k, v, do, causal=True), expected))


def test_each_way_to_multiply_is_learnt_apart(
    emulated: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated(1)
    given = inputs()
    ways = [{"precision": x} for x in ("ieee", "tf32")] + [{"implementation": "plain"}]
    for options in ways:
        chosen = FlashOptions(**options)  # type: ignore[arg-type]
        call = lambda chosen=chosen: flash_attention(*given[:3], causal=True, options=chosen)  # noqa: E731
        assert [num_native(call) for _ in range(2)] == [0, 1], options
    # auto is ieee now, and tf32 once PyTorch may; both are known by now.
    auto = lambda: flash_attention(*given[:3], causal=True)  # noqa: E731
    assert num_native(auto) == 1
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert num_native(auto) == 1
    kinds = [native._kind(given[0], FlashOptions(precision=x)) for x in ("auto", "tf32", "ieee")]
    assert kinds[0] == kinds[1] != kinds[2]
    for dtype in (torch.float32, torch.bfloat16):
        q = given[0].to(dtype)
        assert native._kind(q, FlashOptions(precision="fp8")) is None
        assert native._kind(q, FlashOptions(implementation="hoper")) is None


def test_what_the_plan_does_not_cover_is_pythons(emulated: Emulate) -> None:
    emulated(1)
    q, k, v, do = inputs()
    run(q, k, v, do, causal=True)
    for scale in (-0.5, 0.0, 1e-39):
        before = native.num_calls()
        got = run(q, k, v, do, causal=True, scale=scale)
        assert native.num_calls() == before, scale
        expected = run(q, k, v, do, causal=True, scale=scale, autograd="python")
        assert all(map(torch.equal, got, expected))


def test_values_narrower_than_keys_are_pythons(emulated: Emulate) -> None:
    emulated(1)
    q, k, _, _ = inputs(q_len=64, kv_len=64)
    v = torch.randn(2, 1, 64, 8, requires_grad=True)
    for _ in range(2):
        # The same layout of q and k, which the node knows by then.
        run(q, k, k, torch.randn(2, 1, 64, 16), causal=True)
        for autograd in ("auto", "native"):
            before = native.num_calls()
            got = run(q, k, v, v.detach(), causal=True, autograd=autograd)
            assert native.num_calls() == before
            assert [x.shape[-1] for x in got] == [8, 16, 16, 8]


def test_a_gradient_that_lies_otherwise_runs_in_python_once(
    emulated: Emulate, by_python: list[Any]
) -> None:
    """With the options of the forward pass, and the rest of lse."""
    emulated(1)
    q, k, v, do = inputs(2, 2, 130, 130)

    def gradients(do: Tensor) -> tuple[Tensor, ...]:
        o = flash_attention(q, k, v, causal=True, options=FlashOptions(precision="tf32"))
        return torch.autograd.grad(o, (q, k, v), do)

    expected = gradients(do)
    do = do.contiguous()
    for _ in range(2):
        assert all(map(torch.equal, gradients(do), expected))
    assert by_python == [(True, FlashOptions(precision="tf32"))]


def test_stages_of_a_workspace_share_their_place() -> None:
    both, first, second, third = (torch.empty(n, device="meta") for n in (100, 300, 10, 129))
    planned = PlannedPass([], [both], [[first, second], [third]])
    parts, offsets, total = native._laid_out(planned)
    assert [id(part) for part in parts] == [id(part) for part in (both, first, second, third)]
    assert offsets == [0, 512, 512 + 1536, 512]
    assert total == 512 + 1536 + 512
    assert native._laid_out(PlannedPass([])) == ([], [], 0)
