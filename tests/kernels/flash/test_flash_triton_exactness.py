"""FlashAttention in Triton against float64 attention: shapes, extremes, layouts, packed batches.

Without a GPU the kernels run under Triton's interpreter, with tiles of 16 and 32.
"""

from __future__ import annotations

import pytest
import torch
from exact_attention import (
    assert_close,
    backend,
    exact,
    exact_gradients,
    gives_equal_bits,
    inputs,
    packed,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_device import CLOSENESS, DEVICE, RUNS_TRITON, randn

from kernels.flash import dispatch, flash_attention, operator
from kernels.flash.call.arguments import FlashCall
from kernels.problem import AttentionSpec

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]


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
    spec = AttentionSpec(causal=causal, scale=scale)
    o, lse = flash.forward(q, k, v, spec)
    expected_o, expected_lse = exact(q, k, v, causal, scale)
    assert o.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert_close(o, expected_o, "o", limit)
    assert_close(lse, expected_lse, "lse", limit)
    gradients = flash.backward(do, q, k, v, o, lse, spec)
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


NARROW = [dtype for dtype in CLOSENESS if dtype != torch.float32]

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
    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_lengths(self, lengths: str, causal: bool) -> None:
        q_len, kv_len = LENGTHS[lengths]
        check(*inputs(q_len=q_len, kv_len=kv_len), causal=causal)

    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: str(dtype)[6:])
    @pytest.mark.parametrize("lengths", ["square", "more keys", "fewer keys", "no keys"])
    def test_lengths_in_narrow_types(self, lengths: str, dtype: torch.dtype, causal: bool) -> None:
        q_len, kv_len = LENGTHS[lengths]
        check(*inputs(1, 1, 1, q_len, kv_len, dtype=dtype), causal=causal)

    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    @pytest.mark.parametrize("head_dim", [1, 16, 40, 80, 96, 128, 256])
    def test_head_dims(self, head_dim: int, dtype: torch.dtype) -> None:
        tensors = inputs(heads=1, kv_heads=1, q_len=35, kv_len=50, head_dim=head_dim, dtype=dtype)
        check(*tensors, causal=True, scale=head_dim**-0.5)

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dtype"),
        [
            *((6, 2, torch.float32), (4, 1, torch.float32), (3, 3, torch.float32)),
            *((4, 2, dtype) for dtype in NARROW),
        ],
        ids=lambda value: str(value).removeprefix("torch."),
    )
    def test_grouped_queries(self, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        for causal in (True, False):
            check(*inputs(2, heads, kv_heads, 20, 35, dtype=dtype), causal=causal)

    def test_nothing_in_the_batch(self) -> None:
        check(*inputs(batch=0), causal=True)

    @settings(
        max_examples=16,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
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
        o, _ = backend().forward(q, k, 1e-30 * v, AttentionSpec(causal=True, scale=1e-30))
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
                o, lse, q, k[:, :, keys], v[:, :, keys], AttentionSpec(causal=False, scale=0.3)
            )
        assert o.dtype == lse.dtype == torch.float32
        assert o.data_ptr() == start, "continues in place"
        expected_o, expected_lse = exact(q, k, v, False, 0.3)
        assert_close(o, expected_o, "o", CLOSENESS[dtype])
        assert_close(lse, expected_lse, "lse", CLOSENESS[dtype])
        # Twice the keys' weight for those who see them again.
        again, lse_again = backend().forward_onto(
            o.clone(),
            lse.clone(),
            q,
            k[:, :, :20],
            v[:, :, :20],
            AttentionSpec(causal=True, scale=0.3),
        )
        part_o, part_lse = exact(q, k[:, :, :20], v[:, :, :20], True, 0.3)
        whole_lse = torch.logaddexp(expected_lse, part_lse)
        shares = ((x - whole_lse).exp()[..., None] for x in (expected_lse, part_lse))
        merged = sum(x * share for x, share in zip((expected_o, part_o), shares, strict=True))
        assert_close(again, merged, "o", CLOSENESS[dtype])
        assert_close(lse_again, whole_lse, "lse", CLOSENESS[dtype])


class TestPacked:
    @pytest.mark.parametrize(
        ("dtype", "causal"),
        [
            *((torch.float32, True), (torch.float32, False)),
            *((torch.float16, False), (torch.bfloat16, True)),
        ],
        ids=lambda value: str(value).removeprefix("torch."),
    )
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
        call = FlashCall(q=q, k=k, v=v, spec=AttentionSpec(causal=True, scale=0.3, packing=packing))
        o, lse = operator.forward(call)
        twice, lse_twice = operator.forward(call, accumulator=(o.clone(), lse.clone()))
        assert_close(twice, o.double(), "o", 1e-5)
        assert_close(lse_twice, lse.double() + torch.tensor(2.0).log().item(), "lse", 1e-5)


class TestRepeatable:
    def test_equal_bits(self) -> None:
        assert gives_equal_bits(*inputs(2, 2, 1, 70, 70, dtype=torch.float16))

    def test_a_sequence_does_not_depend_on_its_neighbours(self) -> None:
        q, k, v, _ = inputs(batch=3)
        together = flash_attention(q, k, v, causal=True)
        alone = flash_attention(q[1:2], k[1:2], v[1:2], causal=True)
        assert torch.equal(together[1:2], alone)
