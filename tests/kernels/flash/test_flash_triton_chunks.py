"""Loops of the any-GPU kernels, cut into chunks: which are cut, and that results stay the same."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exact_attention import assert_close, exact, exact_gradients, inputs
from grids import covering
from triton_device import CLOSENESS, DEVICE, RUNS_TRITON, randn

from kernels.backends.flash_triton import FlashTriton
from kernels.flash import flash_attention, operator
from kernels.flash.any_gpu import chunks, launch
from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.flash.call.problem import Problem
from kernels.problem import AttentionProblem, AttentionSpec

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]

PLAIN = FlashOptions(precision="ieee", implementation="plain")


@pytest.fixture
def many_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A device that no call of these tests fills; gives the kernels whose loops were cut."""
    monkeypatch.setattr(chunks, "num_multiprocessors", lambda device: 1000)
    chunks.chunk_rows.cache_clear()
    cut: list[str] = []
    count = chunks.num_chunks

    def note(problem: Problem, kernel: str, size: int) -> int:
        cut.append(kernel)
        return count(problem, kernel, size)

    monkeypatch.setattr(chunks, "num_chunks", note)
    yield cut
    chunks.chunk_rows.cache_clear()


def facts(**changes: Any) -> Problem:
    values: dict[str, Any] = {
        "device": torch.device("cuda", 0), "dtype": torch.float32, "batch_size": 1, "num_heads": 1,
        "num_kv_heads": 1, "q_len": 8192, "kv_len": 8192, "head_dim": 32, "causal": True,
        "packed": False, "accumulates": False, "precision": "bf16x6",
    }  # fmt: skip
    return Problem(**{**values, **changes})


class TestRule:
    @pytest.fixture(autouse=True)
    def _of_an_h200(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(chunks, "num_multiprocessors", lambda device: 132)
        chunks.chunk_rows.cache_clear()
        yield
        chunks.chunk_rows.cache_clear()

    @pytest.mark.parametrize("kernel", ["forward", "backward_dkv", "backward_dq"])
    def test_one_head_is_cut_and_sixteen_are_not(self, kernel: str) -> None:
        size = chunks.chunk_rows(facts(), kernel, 64)
        assert size is not None
        assert size % chunks.ROWS == 0
        assert size < 8192
        assert chunks.chunk_rows(facts(num_heads=16, num_kv_heads=16), kernel, 64) is None

    @pytest.mark.parametrize("length", [256, 512, 2048, 4096, 8192])
    def test_chunks_are_about_two_of_each_multiprocessor(self, length: int) -> None:
        problem = facts(q_len=length, kv_len=length)
        size = chunks.chunk_rows(problem, "forward", 64)
        assert size is not None
        # Under a causal mask a tile's loop has as many rows as there are up to its end.
        programs = sum(-(-end // size) for end in range(64, length + 1, 64))
        assert programs <= 3.2 * 132
        assert size == chunks.ROWS or programs >= 132

    def test_a_full_mask_is_even_already(self) -> None:
        assert chunks.chunk_rows(facts(causal=False), "forward", 64) is None
        assert chunks.chunk_rows(facts(causal=False), "forward", 128) is not None

    def test_query_heads_of_a_group_are_one_loop(self) -> None:
        """Eight key heads of eight query heads each have enough tiles; so has one loop over them
        all, but one key head of 64 has not."""
        many = facts(num_heads=64, num_kv_heads=8)
        one = facts(num_heads=64, num_kv_heads=1)
        assert chunks.chunk_rows(many, "backward_dkv", 64) is None
        assert chunks.chunk_rows(one, "backward_dkv", 64) is not None
        assert chunks.chunk_rows(one, "backward_dq", 64) is None

    @pytest.mark.parametrize("changes", [{"window": 512}, {"packed": True}])
    def test_left_whole(self, changes: dict[str, Any]) -> None:
        for kernel in ("forward", "backward_dkv", "backward_dq"):
            assert chunks.chunk_rows(facts(**changes), kernel, 64) is None

    def test_an_accumulator_keeps_the_forward_pass_whole(self) -> None:
        assert chunks.chunk_rows(facts(accumulates=True), "forward", 64) is None
        assert chunks.chunk_rows(facts(accumulates=True), "backward_dq", 64) is not None

    @pytest.mark.parametrize(("q_len", "kv_len"), [(0, 100), (100, 0), (1, 1), (128, 128)])
    def test_short_loops(self, q_len: int, kv_len: int) -> None:
        problem = facts(q_len=q_len, kv_len=kv_len)
        for kernel, owned in (("forward", q_len), ("backward_dkv", kv_len), ("backward_dq", q_len)):
            if owned:
                assert chunks.chunk_rows(problem, kernel, 64) is None


class TestResults:
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "q_len", "kv_len", "head_dim"),
        [(1, 1, 300, 300, 16), (4, 2, 130, 270, 24), (2, 1, 270, 140, 32)],
    )
    def test_as_exact(
        self,
        dtype: torch.dtype,
        causal: bool,
        num_heads: int,
        num_kv_heads: int,
        q_len: int,
        kv_len: int,
        head_dim: int,
        many_multiprocessors: list[str],
    ) -> None:
        q, k, v, do = inputs(1, num_heads, num_kv_heads, q_len, kv_len, head_dim, dtype)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o, lse = flash_attention(*leaves, causal=causal, return_lse=True, options=PLAIN)
        found = [o, lse, *torch.autograd.grad(o, leaves, do)]
        scale = head_dim**-0.5
        expected = [
            *exact(q, k, v, causal, scale),
            *exact_gradients(q, k, v, do, causal, scale),
        ]
        names = ("o", "lse", "dq", "dk", "dv")
        for name, x, z in zip(names, found, expected, strict=True):
            assert_close(x, z, name, CLOSENESS[dtype])
        assert set(many_multiprocessors) == {"forward", "backward_dkv", "backward_dq"}

    def test_values_narrower_than_keys(self, many_multiprocessors: list[str]) -> None:
        q, k, _, _ = inputs(1, 2, 1, 140, 270, 40)
        v, do = (randn(*x.shape[:-1], 24, seed=seed) for seed, x in ((3, k), (4, q)))
        found = self._results((q, k, v, do), {"causal": True})
        expected = [*exact(q, k, v, True, 0.25), *exact_gradients(q, k, v, do, True, 0.25)]
        for name, x, z in zip(("o", "lse", "dq", "dk", "dv"), found, expected, strict=True):
            assert_close(x, z, name, CLOSENESS[torch.float32])
        assert set(many_multiprocessors) == {"forward", "backward_dkv", "backward_dq"}

    @pytest.mark.parametrize(
        "mask",
        [
            {"causal": True, "prefix_len": 150},
            {"causal": True, "shift": -170},
            {"causal": True, "softcap": 0.7},
        ],
        ids=lambda mask: next(reversed(mask)),
    )
    def test_masks(self, mask: dict[str, Any], many_multiprocessors: list[str]) -> None:
        """As without chunks, also where queries see no key, as in the first 170 rows of a shift."""
        given = inputs(1, 2, 1, 300, 300, 16)
        cut = self._results(given, mask)
        assert set(many_multiprocessors) == {"forward", "backward_dkv", "backward_dq"}
        chunks.chunk_rows.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunks, "num_multiprocessors", lambda device: 1)
            whole = self._results(given, mask)
        chunks.chunk_rows.cache_clear()
        for x, y in zip(cut, whole, strict=True):
            assert torch.equal(x.isinf(), y.isinf())
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-5)

    def test_a_key_that_is_not_a_number_stays_one(self, many_multiprocessors: list[str]) -> None:
        """In the results of the queries that see it, which are those from row 140 on."""
        q, k, v, do = inputs(1, 1, 1, 300, 300, 16)
        k[0, 0, 140, 3] = math.nan
        o, lse, dq, *_ = self._results((q, k, v, do), {"causal": True})
        for x in (o[0, 0].sum(-1), lse[0, 0], dq[0, 0].sum(-1)):
            assert bool(x[140:].isnan().all())
        for x in (o, lse):
            assert bool(x[0, 0, :140].isfinite().all())
        assert many_multiprocessors

    def test_two_runs_give_the_same_bits(self, many_multiprocessors: list[str]) -> None:
        given = inputs(1, 2, 1, 300, 300, 16)
        first, second = (self._results(given, {"causal": True}) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        assert many_multiprocessors

    def _results(self, given: tuple[torch.Tensor, ...], mask: dict[str, Any]) -> list[torch.Tensor]:
        q, k, v, do = given
        call = FlashCall(q=q, k=k, v=v, spec=AttentionSpec(scale=0.25, **mask), options=PLAIN)
        o, lse = operator.forward(call)
        return [o, lse, *operator.backward(call, do, o, lse)]


class TestMemory:
    def problem(self, **changes: Any) -> AttentionProblem:
        values: dict[str, Any] = {
            "batch_size": 1, "num_heads": 1, "num_kv_heads": 1, "q_len": 8192, "kv_len": 8192,
            "head_dim": 32, "causal": True, "dtype": "float32", "device": "cuda",
            "needs_grad": False,
        }  # fmt: skip
        return AttentionProblem(**{**values, **changes})

    def test_chunks_are_counted_where_loops_are_cut(self) -> None:
        backend = FlashTriton(name="flash_triton")
        rows = 12.0 * 8192
        forward, backward = (
            backend.peak_memory(self.problem(needs_grad=needs_grad)) for needs_grad in (False, True)
        )
        assert forward is not None
        assert backward is not None
        # acc, m and l of at least two chunks; dk and dv of as many.
        assert forward["workspace"] >= 2 * 4 * 8192 * 34
        assert backward["workspace"] >= rows + 2 * 2 * 4 * 8192 * 32
        whole = self.problem(num_heads=64, num_kv_heads=64, needs_grad=True)
        assert backend.backward_workspace(whole) == 64 * rows
        assert "workspace" not in (
            backend.peak_memory(self.problem(num_heads=64, num_kv_heads=64)) or {}
        )

    def test_narrower_values_take_less(self) -> None:
        """Of each row of a chunk acc, m and l; and dk and dv, which take more here than dq does."""
        forward, backward = (
            [compute(self.problem(value_dim=width), "auto") for width in (None, 24)]
            for compute in (chunks.forward_workspace, chunks.backward_workspace)
        )
        assert forward[1] / forward[0] == (24 + 2) / (32 + 2)
        assert backward[1] / backward[0] == (32 + 24) / (32 + 32)


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE == "cpu" or launch.INTERPRETED, reason="needs a CUDA device, and torch sees none"
)
class TestOnCuda:
    @pytest.mark.parametrize(
        ("precision", "head_dim", "length"),
        covering(["bf16x6", "ieee", "tf32"], [16, 32, 64, 128], [500, 2048, 4100]),
    )
    def test_one_head(self, precision: str, head_dim: int, length: int) -> None:
        """Against float64; tf32 cuts each of the four numbers behind a gradient to ten bits."""
        given = [torch.randn(1, 1, length, head_dim, device="cuda") for _ in range(4)]
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        options = FlashOptions(precision=precision)
        o, lse = flash_attention(*leaves, causal=True, return_lse=True, options=options)
        found = [o, lse, *torch.autograd.grad(o, leaves, given[3])]
        scale = head_dim**-0.5
        expected = [
            *exact(*given[:3], True, scale),
            *exact_gradients(*given, True, scale),
        ]
        for x, z in zip(found, expected, strict=True):
            error = float((x.double() - z).norm() / z.norm())
            assert error < (2.0**-8 if precision == "tf32" else 2e-6)

    def test_measured_peak_is_the_predicted_one(self) -> None:
        predicted = FlashTriton(name="flash_triton").peak_memory(
            TestMemory().problem(needs_grad=True)
        )
        assert predicted is not None
        gc.collect()
        before = torch.cuda.memory_allocated()
        given = [torch.randn(1, 1, 8192, 32, device="cuda", requires_grad=True) for _ in range(3)]
        do = torch.randn(1, 1, 8192, 32, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        o = flash_attention(*given, causal=True)
        torch.autograd.grad(o, given, do)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak == pytest.approx(sum(predicted.values()), rel=0.02)
