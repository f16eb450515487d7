"""The compiled autograd node on a GPU, against Python's."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from native_node import NODE, ON_HOPPER, run
from torch import Tensor

from kernels.flash import flash_attention, native
from kernels.flash.any_gpu import launch
from kernels.flash.call.arguments import FlashOptions


def random(*shape: int, seed: int, transposed: bool = False) -> Tensor:
    """bfloat16 on the GPU; transposed as a transformer stores it, [B, S, H, D] underneath."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if transposed:
        shape = (shape[0], shape[2], shape[1], shape[3])
    x = torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
    return x.transpose(1, 2) if transposed else x


def on_the_gpu(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int,
    *, seed: int = 0, transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v, which require gradients, and do."""
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len))
    q, k, v, do = (
        random(batch, n, length, head_dim, seed=4 * seed + place, transposed=transposed)
        for place, (n, length) in enumerate(shapes)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def natively(*given: Tensor, causal: bool = True) -> tuple[Tensor, ...]:
    """o, dq, dk, dv by the node, which must know such calls."""
    q, k, v, do = given
    o = flash_attention(q, k, v, causal=causal, options=FlashOptions(autograd="native"))
    assert o.grad_fn.name() == NODE
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def plainly(given: list[Tensor], causal: bool, autograd: str) -> tuple[Tensor, ...]:
    """o, dq, dk, dv by the kernels for any GPU."""
    *inputs, do = given
    options = FlashOptions(implementation="plain", autograd=autograd)
    o = flash_attention(*inputs, causal=causal, options=options)
    return o.detach(), *torch.autograd.grad(o, inputs, do)


SMALL = (2, 4, 4, 257, 257, 64)

SHAPES = [(8, 12, 12, 1024, 1024, 64), (2, 8, 1, 200, 333, 80), (1, 2, 2, 333, 100, 64)]


# With few heads loops of the any-GPU kernels are cut into chunks, with the last they are whole.
ANY_SHAPES = [(1, 1, 1, 1000, 1000, 32), (2, 4, 1, 300, 500, 64), (8, 16, 16, 1024, 1024, 64)]


@pytest.mark.gpu
@pytest.mark.skipif(launch.INTERPRETED, reason="needs a CUDA device")
class TestOnAnyGpu:
    """Bit for bit what Python's node gives."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("causal", [True, False])
    def test_equal_bits(
        self, dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by_python = []
        backward = native._backward

        def counted(*arguments: Any) -> Any:
            by_python.append(arguments)
            return backward(*arguments)

        monkeypatch.setattr(native, "_backward", counted)
        # The node is connected again.
        monkeypatch.setattr(native._Node, "module", None)
        for shape in ANY_SHAPES:
            for transposed in (True, False):
                kept = []
                for seed in range(3):
                    given = [
                        x.detach().to(dtype).requires_grad_(place < 3)
                        for place, x in enumerate(
                            on_the_gpu(*shape, seed=seed, transposed=transposed)
                        )
                    ]
                    kept.append(given)
                    expected = plainly(given, causal, "python")
                    before = native.num_calls()
                    got = plainly(given, causal, "auto")
                    assert native.num_calls() == before + (seed > 0)
                    for x, wanted in zip(got, expected, strict=True):
                        assert torch.equal(x, wanted)
                        assert x.stride() == wanted.stride()
                native.forget()
        assert not by_python

    def test_peak_memory_is_that_of_python(self) -> None:
        """With parts of chunks in one piece, of which stages have the same place."""
        peaks = []
        q, k, v, do = (x.detach().float() for x in on_the_gpu(1, 1, 1, 4096, 4096, 64))
        given = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do]
        for autograd in ("python", "auto"):
            # The first call of a kind is Python's.
            plainly(given, True, autograd)
            torch.cuda.synchronize()
            # What earlier tests left in cycles may not be freed while the peak is counted.
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            calls = native.num_calls()
            plainly(given, True, autograd)
            assert native.num_calls() - calls == (autograd == "auto")
            peaks.append(torch.cuda.max_memory_allocated() - before)
        assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a CUDA device of compute capability 9.0")
class TestOnHopper:
    """Bit for bit what Python's node gives, which other tests compare with float64."""

    @pytest.mark.parametrize("causal", [True, False])
    def test_equal_bits(self, causal: bool) -> None:
        for shape in SHAPES:
            for transposed in (True, False):
                run(*on_the_gpu(*shape, seed=9, transposed=transposed), causal=causal)
                # Kept, so that the allocator gives other addresses to the next.
                kept = []
                for seed in range(2):
                    given = on_the_gpu(*shape, seed=seed, transposed=transposed)
                    kept.append(given)
                    expected = run(*given, causal=causal, autograd="python")
                    for x, wanted in zip(natively(*given, causal=causal), expected, strict=True):
                        assert torch.equal(x, wanted)
                        assert x.stride() == wanted.stride()

    def test_a_side_stream(self) -> None:
        given = on_the_gpu(*SHAPES[0])
        run(*given, causal=True)
        expected = run(*given, causal=True, autograd="python")
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # What comes late on this stream: whoever launches on another reads zeros.
            late = [torch.zeros_like(x) for x in given]
            torch.cuda._sleep(20_000_000)
            for x, y in zip(late, given, strict=True):
                x.copy_(y.detach())
            q, k, v, do = (x.requires_grad_(place < 3) for place, x in enumerate(late))
            got = natively(q, k, v, do)
        stream.synchronize()
        assert all(map(torch.equal, got, expected))

    def test_captured_in_a_graph(self) -> None:
        q, k, v, do = on_the_gpu(*SMALL)
        for _ in range(3):
            run(q, k, v, do, causal=True)
        # The engine's thread is warm on the stream that captures.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            natively(q, k, v, do)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = natively(q, k, v, do)
        other = on_the_gpu(*SMALL, seed=5)
        with torch.no_grad():
            for x, y in zip((q, k, v, do), other, strict=True):
                x.copy_(y)
        graph.replay()
        expected = run(*other, causal=True, autograd="python")
        assert all(map(torch.equal, results, expected))
