"""The compiled autograd node on a Hopper GPU, against Python's."""

from __future__ import annotations

import pytest
import torch
from native_node import NODE, ON_HOPPER, run
from torch import Tensor

from kernels.flash import flash_attention
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


SMALL = (2, 4, 4, 257, 257, 64)

SHAPES = [(8, 12, 12, 1024, 1024, 64), (2, 8, 1, 200, 333, 80), (1, 2, 2, 333, 100, 64)]


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
