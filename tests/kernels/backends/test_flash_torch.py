"""FlashAttention-2 in PyTorch: its tiles, its gradients, and what it keeps in memory.

That its results are right at every shape is tested with all other backends in test_kernels;
here tiles are made so small that every shape has many of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import AttentionProblem
from kernels.backends.flash_torch import FlashTorch
from kernels.flash import FlashAttentionPyTorch as Function
from kernels.flash.pytorch import Tiling
from kernels.problem import AttentionSpec, Mask
from kernels.toolchain import why_not_compile

MASKS = [
    Mask(causal=True),
    Mask(causal=False),
    Mask(causal=True, window=9),
    Mask(causal=False, window=5, shift=-3),
    Mask(causal=True, prefix_len=12),
    Mask(causal=True, shift=6),
]
LENGTHS = [(33, 33), (64, 64), (16, 16), (1, 40), (40, 1), (21, 50), (50, 21), (7, 0)]


def tensors(
    q_len: int, kv_len: int, heads: tuple[int, int] = (6, 2), head_dim: int = 8
) -> list[Tensor]:
    """q, k, v, do in float64."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, count, length, head_dim, generator=generator, dtype=torch.float64)
        for count, length in zip(
            (heads[0], heads[1], heads[1], heads[0]), (q_len, kv_len, kv_len, q_len), strict=True
        )
    ]


def visible_keys(q_len: int, kv_len: int, mask: Mask) -> Tensor:
    """Which keys [S_q, S_k] each query sees, score by score as the mask is defined."""
    rows, columns = torch.meshgrid(torch.arange(q_len), torch.arange(kv_len), indexing="ij")
    positions = rows + kv_len - q_len + mask.shift
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if mask.window is not None:
        seen &= (columns - positions).abs() < mask.window
    if mask.causal:
        seen &= (columns <= positions) | (columns < mask.prefix_len)
    return seen


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over the whole score matrix; rows without a key are zero, by autograd too."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    seen = visible_keys(q.shape[2], k.shape[2], Mask(causal=causal))
    weights = (q @ k.mT * scale).exp() * seen
    total = weights.sum(dim=-1)
    o = weights @ v / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    return o, total.log()


class TestTiles:
    @pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
    @pytest.mark.parametrize("mask", MASKS, ids=str)
    @pytest.mark.parametrize(("block_q", "block_k"), [(16, 16), (8, 20), (20, 8), (64, 64)])
    def test_cover_every_visible_score_once_and_compare_no_more_than_needed(
        self, q_len: int, kv_len: int, mask: Mask, block_q: int, block_k: int
    ) -> None:
        tiling = Tiling(q_len=q_len, kv_len=kv_len, block_q=block_q, block_k=block_k, mask=mask)
        seen = visible_keys(q_len, kv_len, mask)
        count = torch.zeros(q_len, kv_len, dtype=torch.int64)
        for queries in tiling.query_tiles():
            for keys in tiling.key_tiles(queries):
                tile = seen[queries, keys]
                assert tile.any(), "a tile that the mask empties is skipped"
                hidden = tiling.hidden(queries, keys, 1, count)
                assert (hidden is None) == bool(tile.all()), "only edges of the mask are compared"
                count[queries, keys] += tile if hidden is None else ~hidden
        assert torch.equal(count, seen.long())

    def test_a_causal_square_computes_little_more_than_half(self) -> None:
        mask = Mask(causal=True)
        tiling = Tiling(q_len=1024, kv_len=1024, block_q=64, block_k=64, mask=mask)
        tiles = [(q, k) for q in tiling.query_tiles() for k in tiling.key_tiles(q)]
        assert len(tiles) == 16 * 17 / 2
        masked = [tile for tile in tiles if tiling.hidden(*tile, 1, torch.empty(0)) is not None]
        assert len(masked) == 16


class TestResults:
    @pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
    @pytest.mark.parametrize("causal", [True, False])
    def test_in_float64(self, q_len: int, kv_len: int, causal: bool) -> None:
        """To rounding, so that an error of the algorithm cannot hide behind one of the dtype."""
        backend = FlashTorch(name="flash_torch", block_q=16, block_k=8)
        q, k, v, do = tensors(q_len, kv_len)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected, expected_lse = exact(*leaves, causal=causal, scale=0.3)
        wanted = torch.autograd.grad(expected, leaves, do)
        o, lse = backend.forward(q, k, v, AttentionSpec(causal=causal, scale=0.3))
        got = backend.backward(do, q, k, v, o, lse, AttentionSpec(causal=causal, scale=0.3))
        for one, other in zip((o, lse, *got), (expected, expected_lse, *wanted), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-12)

    def test_rows_without_a_key(self) -> None:
        backend = FlashTorch(name="flash_torch", block_q=4, block_k=4)
        q, k, v, do = (x.float() for x in tensors(10, 4))
        o, lse = backend.forward(q, k, v, AttentionSpec(causal=True, scale=0.3))
        dq, _, _ = backend.backward(do, q, k, v, o, lse, AttentionSpec(causal=True, scale=0.3))
        assert (o[:, :, :6] == 0).all()
        assert (lse[:, :, :6] == -torch.inf).all()
        assert (dq[:, :, :6] == 0).all()
        assert lse[:, :, 6:].isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_accumulates_in_float32(self, dtype: torch.dtype) -> None:
        """A long row of equal values keeps its sum, which 8 bits of mantissa would lose."""
        backend = FlashTorch(name="flash_torch", block_q=16, block_k=16)
        k = torch.zeros(1, 1, 4096, 16, dtype=dtype)
        o, lse = backend.forward(
            k[:, :, :1], k, torch.ones_like(k), AttentionSpec(causal=False, scale=1.0)
        )
        assert o.dtype == dtype
        assert lse.dtype == torch.float32
        assert (o == 1).all()
        torch.testing.assert_close(lse, torch.full_like(lse, 4096).log())

    def test_through_torch_compile(self) -> None:
        if reason := why_not_compile("cpu"):
            pytest.skip(reason)
        backend = FlashTorch(name="flash_torch", block_q=16, block_k=16, compile=True)
        q, k, v, do = (x.float() for x in tensors(32, 32, heads=(2, 1)))
        o, lse = backend.forward(q, k, v, AttentionSpec(causal=True, scale=0.3))
        got = backend.backward(do, q, k, v, o, lse, AttentionSpec(causal=True, scale=0.3))
        plain = FlashTorch(name="flash_torch", block_q=16, block_k=16)
        expected = plain.forward(q, k, v, AttentionSpec(causal=True, scale=0.3))
        wanted = plain.backward(do, q, k, v, *expected, AttentionSpec(causal=True, scale=0.3))
        for one, other in zip((o, lse, *got), (*expected, *wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


class TestMemory:
    def test_neither_scores_nor_expanded_keys_exist(self) -> None:
        """8 heads of 512 x 512 scores, and keys expanded for them, would be larger."""
        backend = FlashTorch(name="flash_torch", block_q=16, block_k=16)
        q, k, v, do = (x.float() for x in tensors(16, 512, heads=(8, 1), head_dim=16))
        with LargestTensor() as largest:
            o, lse = backend.forward(q, k, v, AttentionSpec(causal=True, scale=0.3))
            backend.backward(do, q, k, v, o, lse, AttentionSpec(causal=True, scale=0.3))
        assert largest.elements <= k.numel()

    @contextmanager
    def saved(self) -> Iterator[list[Tensor]]:
        kept: list[Tensor] = []

        def pack(x: Tensor) -> Tensor:
            kept.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield kept

    @pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
    def test_the_function_keeps_one_log_sum_exp(self, leading: tuple[int, ...]) -> None:
        q, k, v = (torch.randn(*leading, 40, 8, requires_grad=True) for _ in range(3))
        with self.saved() as kept:
            Function.apply(q, k, v, True)
        assert [x.shape for x in kept].count(q.shape[:-1]) == 1
        assert len(kept) == 5


class TestFunction:
    @pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
    @pytest.mark.parametrize("arguments", [(), (False,), (True,)])
    def test_gradients(self, leading: tuple[int, ...], arguments: tuple[bool, ...]) -> None:
        generator = torch.Generator().manual_seed(2)
        q, k, v = (
            torch.randn(*leading, 70, 4, generator=generator, dtype=torch.float64) for _ in range(3)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = Function.apply(*leaves, *arguments)
        four = [x.reshape(-1, 1, 70, 4) for x in leaves]
        expected, _ = exact(*four, causal=bool(sum(arguments)), scale=4**-0.5)
        do = torch.randn(o.shape, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(o, expected.reshape(o.shape))
        for one, other in zip(
            torch.autograd.grad(o, leaves, do),
            torch.autograd.grad(expected, leaves, do.reshape(expected.shape)),
            strict=True,
        ):
            torch.testing.assert_close(one, other)

    def test_other_numbers_of_dimensions_are_refused(self) -> None:
        with pytest.raises(ValueError, match="2 to 4 dimensions, got 1"):
            Function.apply(*(torch.zeros(4) for _ in range(3)))


class TestOptions:
    @pytest.mark.parametrize("key", ["block_q", "block_k"])
    def test_a_tile_has_at_least_one_row(self, key: str) -> None:
        with pytest.raises(ValueError, match=rf"attention\.{key}=0: must be at least 1"):
            FlashTorch(name="flash_torch", **{key: 0})

    def test_compile_is_what_compiles(self) -> None:
        assert not FlashTorch(name="flash_torch").compiles
        assert FlashTorch(name="flash_torch", compile=True).compiles

    def test_compiling_takes_no_packed_batch(self) -> None:
        problem = AttentionProblem(
            batch_size=1,
            num_heads=1,
            num_kv_heads=1,
            q_len=8,
            kv_len=8,
            head_dim=8,
            dtype="float32",
            device="cpu",
            causal=True,
            needs_grad=True,
            packed=True,
        )
        assert FlashTorch(name="flash_torch").supports(problem) is None
        reason = FlashTorch(name="flash_torch", compile=True).supports(problem)
        assert reason is not None
        assert "packed" in reason
