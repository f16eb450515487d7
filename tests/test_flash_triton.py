"""FlashAttention in Triton against float64 attention: shapes, extremes, options, tile tables.

Without a GPU the kernels run under Triton's interpreter, with tiles of 16 and 32.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import BACKENDS, AttentionProblem, Packing
from kernels.flash import FlashTriton, dispatch, flash_attention, validate
from kernels.toolchain import why_not_compile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device or TRITON_INTERPRET=1",
    ),
    # Rows past the end overflow before they are dropped; numpy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

CLOSENESS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest entry of the expected tensor."""


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.set_float32_matmul_precision("highest")


def backend(**options: object) -> Any:
    return BACKENDS["flash_triton"].target(name="flash_triton", **options)  # type: ignore[call-arg]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def inputs(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    q_len: int = 37,
    kv_len: int = 37,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, do."""
    return (
        randn(batch, heads, q_len, head_dim, dtype=dtype, seed=1),
        randn(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=2),
        randn(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=3),
        randn(batch, heads, q_len, head_dim, dtype=dtype, seed=4),
    )


def exact(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse in float64, differentiable; zero and minus infinity where no key is seen."""
    q, k, v = (x.double() for x in (q, k, v))
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    q_len, kv_len = q.shape[2], k.shape[2]
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(kv_len - q_len)
    empty = ~visible.any(-1)
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    # A row of zeros has a gradient where a row of minus infinities has none.
    p = scores.masked_fill(empty[:, None], 0.0).softmax(-1).masked_fill(empty[:, None], 0.0)
    lse = scores.masked_fill(empty[:, None], 0.0).logsumexp(-1) if kv_len else scores.sum(-1)
    return p @ v, lse.masked_fill(empty, -torch.inf)


def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, _ = exact(*leaves, causal, scale)
    found = torch.autograd.grad(o, leaves, do.double(), allow_unused=True)
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, found, strict=True)]


def assert_close(
    got: Tensor, expected: Tensor, what: str, limit: float, floor: float = 0.5
) -> None:  # fmt: skip
    """Off by at most ``limit`` times the largest entry, or times ``floor`` if that is more.

    Inputs are standard normal; a gradient may be zero but for rounding of terms of that size.
    """
    assert got.shape == expected.shape, what
    if got.numel() == 0:
        return
    if not expected.isfinite().all():
        assert torch.equal(got.isfinite(), expected.isfinite()), what
        assert (got[~got.isfinite()] == -torch.inf).all(), what
        got, expected = (x.nan_to_num(neginf=0.0) for x in (got, expected))
    error = float((got.detach().double() - expected.detach()).abs().max())
    allowed = limit * max(floor, float(expected.detach().abs().max()))
    assert error <= allowed, f"{what} is off by {error:.3g}, more than {allowed:.3g}"


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool,
    scale: float = 0.3,
    limit: float | None = None,
) -> None:
    """Output, lse and gradients of one call."""
    limit = limit or CLOSENESS[q.dtype]
    flash = backend()
    o, lse = flash.forward(q, k, v, causal=causal, scale=scale)
    expected_o, expected_lse = exact(q, k, v, causal, scale)
    assert o.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert_close(o, expected_o, "o", limit)
    assert_close(lse, expected_lse, "lse", limit)
    gradients = flash.backward(do, q, k, v, o, lse, causal=causal, scale=scale)
    # What rounding leaves of dP - D is multiplied by the scale and by k or q.
    factors = [abs(scale) * float(x.abs().max()) for x in (q, k) if x.numel()]
    floor = max(0.5, *factors) if factors else 0.5
    for what, got, wanted, x in zip(
        ("dq", "dk", "dv"),
        gradients,
        exact_gradients(q, k, v, do, causal, scale),
        (q, k, v),
        strict=True,
    ):
        assert got.dtype == x.dtype
        assert_close(got, wanted, what, limit, floor)


LENGTHS = {
    "square": (37, 37),
    "more keys": (19, 70),
    "fewer keys": (70, 19),
    "many fewer keys": (67, 1),
    "whole tiles": (64, 64),
    "one query": (1, 50),
    "no keys": (5, 0),
    "no queries": (0, 5),
}


class TestAgainstFloat64:
    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_lengths(self, lengths: str, dtype: torch.dtype, causal: bool) -> None:
        q_len, kv_len = LENGTHS[lengths]
        check(*inputs(heads=2, q_len=q_len, kv_len=kv_len, dtype=dtype), causal=causal)

    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    @pytest.mark.parametrize("head_dim", [1, 16, 40, 80, 96, 128, 256])
    def test_head_dims(self, head_dim: int, dtype: torch.dtype) -> None:
        tensors = inputs(heads=1, kv_heads=1, q_len=35, kv_len=50, head_dim=head_dim, dtype=dtype)
        check(*tensors, causal=True, scale=head_dim**-0.5)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1), (3, 3)])
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    def test_grouped_queries(self, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        for causal in (True, False):
            check(*inputs(2, heads, kv_heads, 20, 35, dtype=dtype), causal=causal)

    def test_nothing_in_the_batch(self) -> None:
        check(*inputs(batch=0), causal=True)

    @settings(
        max_examples=20, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(
        batch=st.integers(1, 2),
        kv_heads=st.integers(1, 2),
        group_size=st.integers(1, 3),
        q_len=st.integers(0, 50),
        kv_len=st.integers(0, 50),
        head_dim=st.integers(1, 48),
        causal=st.booleans(),
        scale=st.floats(-1, 1),
    )
    def test_any_small_shape(
        self,
        batch: int,
        kv_heads: int,
        group_size: int,
        q_len: int,
        kv_len: int,
        head_dim: int,
        causal: bool,
        scale: float,
    ) -> None:
        tensors = inputs(batch, kv_heads * group_size, kv_heads, q_len, kv_len, head_dim)
        check(*tensors, causal=causal, scale=scale)


class TestExtremes:
    @pytest.mark.parametrize("scale", [0.0, -0.3, -2.0, 1e-300, -1e-40])
    def test_scale_of_any_sign(self, scale: float) -> None:
        for causal, kv_len in ((True, 20), (False, 50)):
            check(*inputs(kv_len=kv_len), causal=causal, scale=scale)

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    def test_scores_of_ten_thousand(self, dtype: torch.dtype, sign: int) -> None:
        """Where exp overflows and float32 has steps of a thousandth."""
        q, k, v, do = inputs(dtype=dtype)
        q, k = 40 * q, 40 * k
        scores = (q.double() @ k.double().mT).abs().max()
        limit = max(5e-3, CLOSENESS[dtype])
        scale = sign * 1e4 / float(scores)
        check(q, k, v, do, causal=False, scale=scale, limit=limit)
        check(q, k, v, do, causal=True, scale=scale, limit=limit)

    def test_all_scores_far_below_zero(self) -> None:
        """exp(-1000) is zero: a softmax that forgets to subtract the largest divides by it."""
        q, k, v, do = inputs(head_dim=17)
        q[..., -1], k[..., -1] = 50.0, -70.0
        check(q, k, v, do, causal=False, limit=1e-3)
        # Two keys fill no tile: those past the end, zeros, must not win.
        check(q, k[:, :, :2], v[:, :, :2], do, causal=False, limit=1e-3)

    def test_tiny_values(self) -> None:
        q, k, v, do = inputs()
        o, _ = backend().forward(q, k, 1e-30 * v, causal=True, scale=1e-30)
        expected, _ = exact(q, k, 1e-30 * v, True, 1e-30)
        assert_close(o * 1e30, expected * 1e30, "o", 1e-5)
        check(1e-20 * q, 1e-20 * k, v, do, causal=True)


class TestLayouts:
    def test_expanded_and_sliced(self) -> None:
        """Heads that share memory, rows inside wider rows, and dimensions in another order."""
        expected = inputs(batch=2, heads=4, kv_heads=2)
        q = torch.cat([expected[0], expected[1].repeat(1, 2, 1, 1)], dim=-1)[..., :16]
        k = expected[1].transpose(1, 2).contiguous().transpose(1, 2)
        v = expected[2][:, :1].expand(-1, 2, -1, -1)
        do = expected[3].mT.contiguous().mT
        assert q.stride(-2) == 32
        assert do.stride(-1) != 1
        check(q, k, v, do, causal=True)

    def test_gradient_of_a_sum(self) -> None:
        """Autograd's gradient of o.sum() is one number, expanded."""
        q, k, v, _ = inputs()
        check(q, k, v, torch.ones((), device=DEVICE).expand(q.shape), causal=True)

    def test_offsets_beyond_32_bits(self) -> None:
        """The last rows lie 2^31 elements behind the first, in memory mostly never touched."""
        if DEVICE == "cuda":
            pytest.skip("a GPU has no memory to promise: 4 GiB for this")
        storage = torch.empty(2**31 + 2**26, dtype=torch.float16)
        for q_len, kv_len, far in ((2, 520, 1), (520, 2, 0)):
            tensors = list(inputs(1, 1, 1, q_len, kv_len, dtype=torch.float16))
            shape = tensors[far].shape
            rows = storage.as_strided(shape, (0, 0, 2**22, 1))
            tensors[far] = rows.copy_(tensors[far])
            check(*tensors, causal=False)

    def test_rows_further_apart_than_a_tile_can_count(self) -> None:
        if DEVICE == "cuda":
            pytest.skip("a GPU has no memory to promise: 6 GiB for this")
        q, k, v, do = inputs(1, 1, 1, 12, 12, dtype=torch.float16)
        storage = torch.empty(12 * 2**28, dtype=torch.float16)
        k = storage.as_strided(k.shape, (0, 0, 2**28, 1)).copy_(k)
        check(q, k, v, do, causal=False)
        del storage, k
        # Results in the layout of q, rows 2^23 elements apart, would be as far.
        wide = torch.empty(2, 2**19, 1, 16, dtype=torch.float16).permute(1, 2, 0, 3)
        assert dispatch.empty_like(wide).stride(-2) == 16


class TestLse:
    def test_gradient_that_reaches_lse(self) -> None:
        for causal, kv_len in ((True, 20), (False, 50)):
            q, k, v, do = inputs(heads=4, kv_heads=2, kv_len=kv_len)
            dlse = randn(1, 4, 37, seed=9)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o, lse = flash_attention(*leaves, causal=causal, scale=0.3, return_lse=True)
            got = torch.autograd.grad((o, lse), leaves, (do, dlse))
            doubles = [x.double().requires_grad_() for x in (q, k, v)]
            exact_o, exact_lse = exact(*doubles, causal, 0.3)
            exact_lse = torch.where(exact_lse.isfinite(), exact_lse, 0.0)
            wanted = torch.autograd.grad(
                (exact_o, exact_lse), doubles, (do.double(), dlse.double())
            )  # fmt: skip
            for what, dx, expected in zip(("dq", "dk", "dv"), got, wanted, strict=True):
                assert_close(dx, expected, what, 2e-5)

    def test_lse_alone(self) -> None:
        q, k, v, _ = (x.requires_grad_() for x in inputs())
        _, lse = flash_attention(q, k, v, scale=0.3, return_lse=True)
        dq, dv = torch.autograd.grad(lse.sum(), (q, v))
        leaf = q.detach().double().requires_grad_()
        exact(leaf, k.detach(), v.detach(), False, 0.3)[1].sum().backward()
        assert leaf.grad is not None
        assert_close(dq, leaf.grad, "dq", 2e-5)
        assert (dv == 0).all()

    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    def test_accumulator(self, dtype: torch.dtype) -> None:
        """Keys in parts, from nothing; then a part that a causal mask hides from some queries."""
        q, k, v, _ = inputs(2, 4, 2, 37, 60, dtype=dtype)
        shape = q.shape
        o = torch.full(shape, 7.0, device=DEVICE)
        lse = torch.full(shape[:-1], -torch.inf, device=DEVICE)
        start = o.data_ptr()
        for keys in (slice(0, 33), slice(33, 33), slice(33, 60)):
            o, lse = backend().forward_onto(
                o, lse, q, k[:, :, keys], v[:, :, keys], causal=False, scale=0.3
            )
        assert o.dtype == lse.dtype == torch.float32
        assert o.data_ptr() == start, "continues in place"
        expected_o, expected_lse = exact(q, k, v, False, 0.3)
        assert_close(o, expected_o, "o", CLOSENESS[dtype])
        assert_close(lse, expected_lse, "lse", CLOSENESS[dtype])
        # Twice the keys' weight for those who see them again.
        again, lse_again = backend().forward_onto(
            o.clone(), lse.clone(), q, k[:, :, :20], v[:, :, :20], causal=True, scale=0.3
        )
        part_o, part_lse = exact(q, k[:, :, :20], v[:, :, :20], True, 0.3)
        whole_lse = torch.logaddexp(expected_lse, part_lse)
        shares = ((x - whole_lse).exp()[..., None] for x in (expected_lse, part_lse))
        merged = sum(x * share for x, share in zip((expected_o, part_o), shares, strict=True))
        assert_close(again, merged, "o", CLOSENESS[dtype])
        assert_close(lse_again, whole_lse, "lse", CLOSENESS[dtype])


def packed(
    lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Packing]:
    q_len, kv_len = (sum(pair[i] for pair in lengths) for i in (0, 1))
    ends = [
        torch.tensor([0, *itertools.accumulate(pair[i] for pair in lengths)], dtype=torch.int32)
        for i in (0, 1)
    ]
    packing = Packing(
        cu_seqlens_q=ends[0].to(DEVICE),
        cu_seqlens_k=ends[1].to(DEVICE),
        max_q_len=max(pair[0] for pair in lengths),
        max_kv_len=max(pair[1] for pair in lengths),
    )
    return (
        randn(q_len, 4, 24, dtype=dtype, seed=1),
        randn(kv_len, 2, 24, dtype=dtype, seed=2),
        randn(kv_len, 2, 24, dtype=dtype, seed=3),
        randn(q_len, 4, 24, dtype=dtype, seed=4),
        packing,
    )


class TestPacked:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    def test_each_sequence_alone(self, dtype: torch.dtype, causal: bool) -> None:
        """Among them an empty one, one without keys, and one with fewer keys than queries."""
        q, k, v, do, packing = packed([(40, 40), (0, 0), (1, 50), (7, 0), (35, 3)], dtype)
        dlse = randn(4, q.shape[0], seed=5)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o, lse = flash_attention(*leaves, causal=causal, packing=packing, return_lse=True)
        gradients = torch.autograd.grad((o, lse), leaves, (do, dlse))
        limit = CLOSENESS[dtype]
        for queries, keys in packing.slices():
            own = [
                x[s].transpose(0, 1).unsqueeze(0).detach().double().requires_grad_()
                for x, s in zip((q, k, v), (queries, keys, keys), strict=True)
            ]
            wanted_o, wanted_lse = exact(*own, causal, 24**-0.5)
            assert_close(o[queries].transpose(0, 1), wanted_o[0], "o", limit)
            assert_close(lse[:, queries], wanted_lse[0], "lse", limit)
            if queries.start == queries.stop or keys.start == keys.stop:
                assert (gradients[0][queries] == 0).all()
                continue
            finite = torch.where(wanted_lse.isfinite(), wanted_lse, 0.0)
            into = (do[queries].double().transpose(0, 1)[None], dlse[:, queries].double()[None])
            wanted = torch.autograd.grad((wanted_o, finite), own, into)
            for what, got, s, expected in zip(
                ("dq", "dk", "dv"), gradients, (queries, keys, keys), wanted, strict=True
            ):
                assert_close(got[s].transpose(0, 1), expected[0], what, limit)

    def test_accumulator(self) -> None:
        q, k, v, _, packing = packed([(20, 33), (3, 5)])
        from kernels.flash import operator

        options: dict[str, Any] = {"causal": True, "scale": 0.3, "packing": packing}
        o, lse = operator.forward(q, k, v, **options)
        twice, lse_twice = operator.forward(
            q, k, v, accumulator=(o.clone(), lse.clone()), **options
        )  # fmt: skip
        assert_close(twice, o.double(), "o", 1e-5)
        assert_close(lse_twice, lse.double() + torch.tensor(2.0).log().item(), "lse", 1e-5)


class TestRepeatable:
    def test_equal_bits(self) -> None:
        q, k, v, do = inputs(2, 4, 2, 70, 70, dtype=torch.float16)
        runs = []
        for _ in range(2):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o = flash_attention(*leaves, causal=True)
            runs.append([o, *torch.autograd.grad(o, leaves, do)])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    def test_a_sequence_does_not_depend_on_its_neighbours(self) -> None:
        q, k, v, _ = inputs(batch=3)
        together = flash_attention(q, k, v, causal=True)
        alone = flash_attention(q[1:2], k[1:2], v[1:2], causal=True)
        assert torch.equal(together[1:2], alone)


class TestFunctions:
    @pytest.mark.parametrize("shape", [(2, 33, 16), (2, 3, 33, 16)])
    @pytest.mark.parametrize("is_causal", [True, False])
    def test_the_course_contract(self, shape: tuple[int, ...], is_causal: bool) -> None:
        """CS336 assignment 2: what is saved besides Q, K, V and O is the log-sum-exp."""
        Q, K, V, dO = (randn(*shape, seed=s) for s in range(4))
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        O = FlashTriton.apply(*leaves, is_causal)  # noqa: E741
        saved = [x for x in O.grad_fn.saved_tensors if x.shape == shape[:-1]]
        assert len(saved) == 1
        assert len(O.grad_fn.saved_tensors) == 5
        q, k, v, do = (x if x.dim() == 4 else x[:, None] for x in (Q, K, V, dO))
        expected_o, expected_lse = exact(q, k, v, is_causal, 0.25)
        assert_close(O, expected_o.view(shape), "O", 2e-5)
        assert_close(saved[0], expected_lse.view(shape[:-1]), "L", 2e-5)
        wanted = exact_gradients(q, k, v, do, is_causal, 0.25)
        for got, expected in zip(torch.autograd.grad(O, leaves, dO), wanted, strict=True):
            assert_close(got, expected.view(shape), "gradient", 2e-5)

    def test_not_causal_by_default(self) -> None:
        Q, K, V = (randn(2, 20, 16, seed=s) for s in range(3))
        assert torch.equal(FlashTriton.apply(Q, K, V), FlashTriton.apply(Q, K, V, False))

    def test_autocast(self) -> None:
        q, k, v, _ = inputs()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            o = flash_attention(q, k, v.bfloat16(), causal=True)
        assert o.dtype == torch.bfloat16
        assert_close(o, exact(q, k, v, True, 0.25)[0], "o", 3e-2)

    def test_without_gradients_nothing_is_kept(self) -> None:
        q, k, v, _ = (x.requires_grad_() for x in inputs())
        with torch.no_grad():
            assert flash_attention(q, k, v).grad_fn is None

    @pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
    def test_compiles_without_graph_break(self, compiler: str) -> None:
        if compiler == "inductor" and (reason := why_not_compile(DEVICE)):
            pytest.skip(reason)
        torch._dynamo.reset()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            o, lse = flash_attention(q * 2, k, v, causal=True, return_lse=True)
            return o.sin(), lse

        q, k, v, do = inputs(heads=4)
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        results = []
        for function in (attend, torch.compile(attend, fullgraph=True, backend=compiler)):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o, lse = function(*leaves)
            results.append([o, lse, *torch.autograd.grad((o, lse), leaves, (do, do[..., 0]))])
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)

    def test_backend_and_packed_batch_compile(self) -> None:
        torch._dynamo.reset()
        q, k, v, do, packing = packed([(20, 20), (5, 9)])
        flash = backend()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash.attend_packed(q, k, v, packing, causal=True, scale=0.3)

        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
        for own, function in zip(leaves, (attend, compiled), strict=True):
            function(*own).backward(do)
        for eager, other in zip(*leaves, strict=True):
            assert eager.grad is not None
            assert torch.equal(eager.grad, other.grad)

    def test_course_function_compiles(self) -> None:
        torch._dynamo.reset()
        Q, K, V = (randn(2, 20, 16, seed=s).requires_grad_() for s in range(3))
        compiled = torch.compile(FlashTriton.apply, fullgraph=True, backend="aot_eager")
        compiled(Q, K, V, True).sum().backward()
        assert Q.grad is not None
        wanted = torch.autograd.grad(FlashTriton.apply(Q, K, V, True).sum(), Q)[0]
        assert torch.equal(Q.grad, wanted)

    def test_operators_keep_pytorchs_rules(self) -> None:
        q, k, v, _ = (x.requires_grad_() for x in inputs(q_len=5, kv_len=5))
        arguments = (q, k, v, True, 0.3, None, None, 0, 0, None, None, "ieee", "auto", False)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        operator = torch.ops.attnbench.flash_forward.default
        torch.library.opcheck(operator, arguments, test_utils=checks)
        accumulator = (torch.zeros_like(q).detach(), torch.zeros(q.shape[:-1], device=DEVICE))
        arguments = (*(x.detach() for x in arguments[:3]), *arguments[3:9], *accumulator,
                     *arguments[11:])  # fmt: skip
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"q": (2, 3, 16)}, r"q is \[2, 3, 16\]: must be \[batch, heads, seq, head_dim\]"),
            ({"v": (1, 2, 8, 16)}, r"v is \[1, 2, 8, 16\]: must be \[1, 2, 9, 16\], like k"),
            ({"q": (1, 2, 9, 8)}, "k has head_dim 16: must be 8, like q"),
            ({"q": (3, 2, 9, 16)}, "k has batch size 1: must be 3, like q"),
            ({"q": (1, 3, 9, 16)}, "k has 2 heads: must divide the 3 heads of q"),
            (
                {"q": (1, 2, 9, 257), "k": (1, 2, 9, 257), "v": (1, 2, 9, 257)},
                "head_dim is 257: must be 1 to 256",
            ),
            ({"dtype_k": torch.float16}, "k is float16: must be float32, like q"),
            ({"dtype_q": torch.float64}, "q is float64: must be one of float32, float16, bfloat16"),
            ({"device_v": "meta"}, "v is on meta: must be on cpu, like q"),
            ({"precision": "high"}, "precision is high: must be one of auto, ieee, tf32"),
            ({"o": torch.float16}, r"the accumulator's o is .*float16.*must be .*float32"),
            ({"cu_dtype": torch.int64}, r"cu_seqlens_q is \[2\] int64 .*: must be .* int32"),
            ({"cu_length": 3}, "cu_seqlens_k has 3 entries: must be 2, like cu_seqlens_q"),
        ],
    )
    def test_one_line_that_says_what_would_be_right(
        self, change: dict[str, Any], message: str
    ) -> None:
        shapes = {name: change.get(name, (1, 2, 9, 16)) for name in "qkv"}
        dtypes = {name: change.get(f"dtype_{name}", torch.float32) for name in "qkv"}
        q, k, v = (
            torch.zeros(
                shapes[name], dtype=dtypes[name], device=change.get(f"device_{name}", "cpu")
            )
            for name in "qkv"
        )
        options: dict[str, Any] = {"precision": change.get("precision", "ieee")}
        if "o" in change:
            options["accumulator"] = (q.to(change["o"]), torch.zeros(1, 2, 9))
        if change.keys() & {"cu_dtype", "cu_length"}:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            options["packing"] = Packing(
                cu_seqlens_q=torch.tensor([0, 9], dtype=change.get("cu_dtype", torch.int32)),
                cu_seqlens_k=torch.zeros(change.get("cu_length", 2), dtype=torch.int32),
                max_q_len=9,
                max_kv_len=9,
            )
        with pytest.raises(ValueError, match=message) as caught:
            validate(q, k, v, **options)
        assert "\n" not in str(caught.value)

    def test_gradients_that_do_not_fit(self) -> None:
        q, k, v, do = inputs(q_len=5, kv_len=5)
        o, lse = backend().forward(q, k, v, causal=True, scale=0.3)
        options = {"causal": True, "scale": 0.3}
        with pytest.raises(ValueError, match=r"do is \[1, 2, 4, 16\]: must be \[1, 2, 5, 16\]"):
            backend().backward(do[:, :, 1:], q, k, v, o, lse, **options)
        with pytest.raises(ValueError, match="do is float16: must be float32, like q"):
            backend().backward(do.half(), q, k, v, o, lse, **options)
        with pytest.raises(ValueError, match="lse is float16: must be float32"):
            backend().backward(do, q, k, v, o, lse.half(), **options)

    def test_options(self) -> None:
        from kernels.flash import operator

        q, k, v, _ = inputs(q_len=5, kv_len=5)
        with pytest.raises(ValueError, match="implementation is best: must be one of auto"):
            operator.forward(q, k, v, causal=True, scale=0.3, implementation="best")
        with pytest.raises(
            ValueError, match=r"attention\.implementation=best: must be one of auto"
        ):
            backend(implementation="best")
        with pytest.raises(ValueError, match=r"attention\.float32_precision=fp8: must be one of"):
            backend(float32_precision="fp8")


def numbers(**changes: Any) -> AttentionProblem:
    small = AttentionProblem(
        batch_size=1, num_heads=2, num_kv_heads=2, q_len=8, kv_len=8, head_dim=16,
        dtype="bfloat16", device=DEVICE, causal=True, needs_grad=True,
    )  # fmt: skip
    return replace(small, **changes)


class TestSupport:
    def test_says_what_it_cannot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert backend().supports(numbers()) is None
        assert backend().supports(numbers(q_len=8, kv_len=3, packed=True)) is None
        assert "256" in backend().supports(numbers(head_dim=512))
        assert "float64" in backend().supports(numbers(dtype="float64"))
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert "CUDA" in backend().supports(numbers(device="cpu"))


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder and a device that no table knows."""
    from kernels.flash import configs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(configs, "_device_facts", lambda device: ("Some GPU", 100 * 1024))
    configs._cached.cache_clear()
    yield configs.cache_path("Some GPU")
    configs._cached.cache_clear()


def facts(**changes: Any) -> Any:
    from kernels.flash.problem import Problem

    values: dict[str, Any] = {
        "device": torch.device("cpu"), "dtype": torch.bfloat16, "batch_size": 1, "num_heads": 2,
        "num_kv_heads": 2, "q_len": 4096, "kv_len": 4096, "head_dim": 64, "causal": True,
        "packed": False, "accumulates": False, "precision": "ieee",
    }  # fmt: skip
    return Problem(**{**values, **changes})


class TestConfigs:
    ROW = "forward/bfloat16/d64/causal/long"
    SLOW: ClassVar = {"block_q": 16, "block_k": 16, "num_warps": 1, "num_stages": 1}

    def test_rows_are_named_by_what_matters(self) -> None:
        from kernels.flash.configs import shape_class

        assert shape_class("forward", facts()) == self.ROW
        other = facts(dtype=torch.float32, precision="tf32", head_dim=80, causal=False, q_len=1,
                      kv_len=2048)  # fmt: skip
        assert shape_class("backward_dq", other) == "backward_dq/tf32/d128/full/short"

    def test_order(self, tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The shipped table, then the user's, then a search if asked for, then the rule."""
        from kernels.flash import configs

        def measure(config: configs.TileConfig) -> float:
            return 1.0 if config == wanted else 2.0

        wanted = configs.candidates("forward", facts(), 100 * 1024)[2]
        rule = configs.choose("forward", facts(), measure)
        assert rule == configs.candidates("forward", facts(), 100 * 1024)[0] != wanted
        assert configs.choose("forward", facts(autotune=True), measure) == wanted
        assert configs.read_table(tables) == {self.ROW: wanted}
        configs._cached.cache_clear()
        assert configs.choose("forward", facts()) == wanted, "read from the file"
        pinned = configs.TileConfig(**self.SLOW)
        monkeypatch.setattr(configs, "_pinned", lambda: {"Some GPU": {self.ROW: pinned}})
        assert configs.choose("forward", facts()) == pinned

    def test_search_skips_what_fails_and_counts_its_time(self, tables: Path) -> None:
        from kernels.flash import configs

        found = configs.candidates("backward_dq", facts(), 100 * 1024)
        before = configs.autotune_seconds()

        def measure(config: configs.TileConfig) -> float:
            time.sleep(0.002)
            if config != found[-1]:
                raise RuntimeError("out of resource: shared memory")
            return 1.0

        assert configs.choose("backward_dq", facts(autotune=True), measure) == found[-1]
        assert configs.autotune_seconds() - before >= 0.002 * len(found)

        def fail(config: configs.TileConfig) -> float:
            raise RuntimeError("out of resource: registers")

        with pytest.raises(RuntimeError, match=r"no tile size works here.*registers"):
            configs.choose("backward_dkv", facts(autotune=True), fail)

    @pytest.mark.parametrize("text", ["{", "[]", '{"row": {"block_q": 1}}', '{"row": 3}', "null"])
    def test_corrupt_file(self, tables: Path, text: str) -> None:
        from kernels.flash import configs

        tables.parent.mkdir(parents=True)
        tables.write_text(text, encoding="utf-8")
        with pytest.warns(UserWarning, match="ignored, not a table"):
            chosen = configs.choose("forward", facts())
        assert chosen == configs.candidates("forward", facts(), 100 * 1024)[0]

    def test_many_writers(self, tables: Path) -> None:
        """A reader sees a whole table at any moment."""
        from kernels.flash import configs

        table = {f"row{i}": configs.TileConfig(**self.SLOW) for i in range(50)}
        writers = [
            threading.Thread(target=lambda: [configs._write(tables, table) for _ in range(20)])
            for _ in range(3)
        ]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            assert configs.read_table(tables) in ({}, table)
        for writer in writers:
            writer.join()
        assert [path.name for path in tables.parent.iterdir()] == [tables.name]

    def test_shipped_table(self) -> None:
        from kernels.flash import configs

        path = Path(configs.__file__).with_name("pinned.json")
        for rows in json.loads(path.read_text(encoding="utf-8")).values():
            for row in rows:
                kernel, dtype, head_dim, mask, length = row.split("/")
                assert kernel in configs.INTERPRETER
                assert dtype in ("float32", "tf32", "float16", "bfloat16")
                assert head_dim in ("d16", "d32", "d64", "d128", "d256")
                assert mask in ("causal", "full")
                assert length in ("short", "long")
        assert configs._pinned()["NVIDIA H200"]

    @pytest.mark.parametrize("kernel", ["forward", "backward_dkv", "backward_dq"])
    @pytest.mark.parametrize("shared_memory_kib", [48, 64, 99, 163, 227])
    def test_every_gpu_has_a_candidate(self, kernel: str, shared_memory_kib: int) -> None:
        from kernels.flash import configs

        for dtype, head_dim in itertools.product(CLOSENESS, (16, 64, 128, 256)):
            problem = facts(dtype=dtype, head_dim=head_dim)
            for config in configs.candidates(kernel, problem, shared_memory_kib * 1024):
                assert min(config.block_q, config.block_k) >= 16

    def test_autotuning_leaves_the_accumulator_alone(
        self, tables: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kernels.flash import configs, operator, plain

        q, k, v, _ = inputs(q_len=20, kv_len=20)
        o, lse = operator.forward(q, k, v, causal=True, scale=0.3)
        options: dict[str, Any] = {"causal": True, "scale": 0.3}
        wanted = operator.forward(q, k, v, accumulator=(o.clone(), lse.clone()), **options)
        monkeypatch.setattr(plain, "_configs", {})
        measured = []

        def choose(kernel: str, problem: Any, measure: Any) -> Any:
            measured.append(measure(configs.INTERPRETER[kernel]))
            return configs.INTERPRETER[kernel]

        monkeypatch.setattr(plain, "_config", choose)
        monkeypatch.setattr(plain, "_milliseconds", lambda run: run() or 1.0)
        got = operator.forward(
            q, k, v, accumulator=(o.clone(), lse.clone()), autotune=True, **options
        )  # fmt: skip
        assert measured
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


REAL = {
    "leaderboard": {"heads": 16, "kv_heads": 16, "length": 4096, "head_dim": 64},
    "llama3_8b": {"heads": 32, "kv_heads": 8, "length": 2048, "head_dim": 128},
    "odd length": {"heads": 4, "kv_heads": 4, "length": 1027, "head_dim": 64},
    "padded head": {"heads": 4, "kv_heads": 2, "length": 1500, "head_dim": 80},
    "wide head": {"heads": 2, "kv_heads": 2, "length": 1024, "head_dim": 256},
}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device, and torch sees none")
class TestOnCuda:
    @pytest.mark.parametrize("shape", REAL)
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    @pytest.mark.parametrize("implementation", ["auto", "plain"])
    def test_as_exact_as_pytorch(
        self, shape: str, causal: bool, dtype: torch.dtype, implementation: str
    ) -> None:
        """Relative errors at most twice those of PyTorch's flash kernel, or math in float32."""
        sizes = REAL[shape]
        length, head_dim = sizes["length"], sizes["head_dim"]
        tensors = inputs(
            1, sizes["heads"], sizes["kv_heads"], length, length, head_dim, dtype
        )  # fmt: skip
        q, k, v, do = tensors
        scale = head_dim**-0.5
        expected = [exact(q, k, v, causal, scale)[0], *exact_gradients(*tensors, causal, scale)]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = flash_attention(
            *leaves, causal=causal, precision="ieee", implementation=implementation
        )  # fmt: skip
        got = [o, *torch.autograd.grad(o, leaves, do)]
        name = "sdpa_math" if dtype == torch.float32 else "sdpa_flash"
        peer = BACKENDS[name].target(name=name, **BACKENDS[name].preset)  # type: ignore[call-arg]
        theirs_o = peer.attend(*leaves, causal=causal, scale=scale)
        theirs = [theirs_o, *torch.autograd.grad(theirs_o, leaves, do)]
        for what, x, y, z in zip(("o", "dq", "dk", "dv"), got, theirs, expected, strict=True):
            ours, limit = relative_error(x, z), 2 * relative_error(y, z)
            assert ours <= limit, f"{what}: {ours:.3g}, more than {limit:.3g}"

    def test_tf32(self) -> None:
        q, k, v, _ = inputs(1, 4, 4, 512, 512, 64)
        expected = exact(q, k, v, True, 0.125)[0]
        errors = {
            precision: relative_error(
                flash_attention(q, k, v, causal=True, precision=precision), expected
            )
            for precision in ("ieee", "tf32")
        }
        assert errors["ieee"] < 2e-6
        assert errors["ieee"] < errors["tf32"] < 2e-3

    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    def test_autotune(self, dtype: torch.dtype, tables: Path) -> None:
        """Every candidate of a kernel runs or drops out, and the winner is right."""
        q, k, v, do = inputs(1, 4, 2, 700, 700, 128, dtype)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = flash_attention(
            *leaves, causal=True, autotune=True, precision="ieee", implementation="plain"
        )  # fmt: skip
        found = [o, *torch.autograd.grad(o, leaves, do)]
        scale = 128**-0.5
        expected = [exact(q, k, v, True, scale)[0], *exact_gradients(q, k, v, do, True, scale)]
        for x, z in zip(found, expected, strict=True):
            assert_close(x, z, "result", CLOSENESS[dtype])
        assert len(json.loads(tables.read_text(encoding="utf-8"))) == 3

    def test_equal_bits_at_real_sizes(self) -> None:
        q, k, v, do = inputs(1, 8, 2, 4096, 4096, 128, torch.bfloat16)
        runs = []
        for _ in range(2):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o = flash_attention(*leaves, causal=True)
            runs.append([o, *torch.autograd.grad(o, leaves, do)])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
