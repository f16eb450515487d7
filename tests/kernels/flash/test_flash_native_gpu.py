"""The compiled autograd node on a Hopper GPU, against Python's."""

from __future__ import annotations

import threading

import pytest
import torch
from native_node import NODE, ON_HOPPER, run
from torch import Tensor

from kernels.flash import flash_attention, native
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


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a CUDA device of compute capability 9.0")
class TestOnHopper:
    """Bit for bit what Python's node gives, which other tests compare with float64."""

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("transposed", [True, False])
    @pytest.mark.parametrize(
        "shape",
        [
            (8, 12, 12, 1024, 1024, 64),
            (2, 4, 4, 300, 300, 128),
            (1, 8, 2, 257, 257, 64),
            (2, 8, 1, 200, 333, 80),
            (1, 2, 2, 333, 100, 64),
            (1, 2, 2, 1, 1, 16),
        ],
    )
    def test_equal_bits(self, shape: tuple[int, ...], transposed: bool, causal: bool) -> None:
        run(*on_the_gpu(*shape, seed=9, transposed=transposed), causal=causal)
        for seed in range(3):
            # Kept, so that the allocator gives other addresses to the next.
            given = on_the_gpu(*shape, seed=seed, transposed=transposed)
            expected = run(*given, causal=causal, autograd="python")
            for _ in range(2):
                got = natively(*given, causal=causal)
                for x, wanted in zip(got, expected, strict=True):
                    assert torch.equal(x, wanted)
                    assert x.stride() == wanted.stride()

    def test_it_is_the_node_that_runs_the_backward_pass(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(*on_the_gpu(*SMALL), causal=True)
        monkeypatch.setattr(native.dispatch, "backward_of", lambda *_, **__: 1 / 0)
        natively(*on_the_gpu(*SMALL, seed=1))

    def test_views_of_one_projection(self) -> None:
        """q, k and v not contiguous, as a fused projection gives them, and do expanded."""
        for seed in range(3):
            qkv = random(2, 100, 3, 4 * 64, seed=seed).requires_grad_()
            results = []
            for autograd in ("python", "auto"):
                q, k, v = (qkv[:, :, i].unflatten(-1, (4, 64)).transpose(1, 2) for i in range(3))
                o = flash_attention(q, k, v, causal=True, options=FlashOptions(autograd=autograd))
                results.append(torch.autograd.grad(o.float().sum(), qkv)[0])
            assert torch.equal(*results)
        assert o.grad_fn.name() == NODE

    def test_addresses_that_moved(self) -> None:
        run(*on_the_gpu(*SMALL), causal=True)
        kept = []
        for seed in range(4):
            given = on_the_gpu(*SMALL, seed=seed)
            expected = run(*given, causal=True, autograd="python")
            torch.cuda.empty_cache()
            kept.append(torch.empty(seed * 3000 + 1, device="cuda"))
            moved = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
            assert all(map(torch.equal, natively(*moved), expected))

    def test_a_side_stream(self) -> None:
        run(*on_the_gpu(*SMALL), causal=True)
        given = on_the_gpu(8, 12, 12, 1024, 1024, 64)
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

    def test_threads(self) -> None:
        run(*on_the_gpu(*SMALL), causal=True)
        sets = [on_the_gpu(*SMALL, seed=seed) for seed in range(4)]
        expected = [run(*given, causal=True, autograd="python") for given in sets]
        torch.cuda.synchronize()
        failures: list[BaseException] = []

        def work(given: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(50):
                        got = natively(*given)
                        torch.cuda.current_stream().synchronize()
                        assert all(map(torch.equal, got, wanted))
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=both) for both in zip(sets, expected, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

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
        for seed in (5, 6):
            other = on_the_gpu(*SMALL, seed=seed)
            with torch.no_grad():
                for x, y in zip((q, k, v, do), other, strict=True):
                    x.copy_(y)
            graph.replay()
            expected = run(*other, causal=True, autograd="python")
            assert all(map(torch.equal, results, expected))

    def test_under_autocast(self) -> None:
        for _ in range(2):
            q, k, v, do = (x.detach().float() for x in on_the_gpu(*SMALL))
            q.requires_grad_()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                o = flash_attention(q, k, v, causal=True)
                wanted = flash_attention(
                    q, k, v, causal=True, options=FlashOptions(autograd="python")
                )
            results = [torch.autograd.grad(x, q, do.to(x.dtype)) for x in (o, wanted)]
            assert torch.equal(o, wanted)
            assert torch.equal(results[0][0], results[1][0])
        assert o.grad_fn.name() == NODE
