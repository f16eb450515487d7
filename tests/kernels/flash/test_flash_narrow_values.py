"""Values of fewer columns than keys, as latent attention trains: against float64, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_attention import assert_close, backend, exact, exact_gradients
from torch import Tensor
from triton_device import CLOSENESS, DEVICE, RUNS_TRITON, randn

from kernels import BACKENDS, Packing
from kernels.flash import FlashAttentionPyTorch, FlashAttentionTriton, dispatch, flash_attention
from kernels.flash.call.arguments import DEFAULT_OPTIONS, FlashOptions
from kernels.flash.call.problem import describe
from kernels.problem import AttentionSpec
from kernels.query_gradient import QueryBlock

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]

NAMES = ("flash_triton", "flash_torch")

RESULTS = ("o", "lse", "dq", "dk", "dv")


def inputs(
    q_len: int = 37,
    kv_len: int = 37,
    head_dim: int = 24,
    v_dim: int = 10,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, do."""
    return (
        randn(batch, heads, q_len, head_dim, dtype=dtype, seed=1),
        randn(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=2),
        randn(batch, kv_heads, kv_len, v_dim, dtype=dtype, seed=3),
        randn(batch, heads, q_len, v_dim, dtype=dtype, seed=4),
    )


def rows_of_wider(x: Tensor) -> Tensor:
    """x within a tensor of which all else is not a number, and would spread."""
    wider = torch.nn.functional.pad(x, (0, 200), value=torch.nan)
    return wider[..., : x.shape[-1]]


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def assert_all_close(got: Any, expected: Any, limit: float) -> None:
    for name, x, y in zip(RESULTS, got, expected, strict=True):
        assert_close(x, y, name, limit)


class TestAgainstFloat64:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(
        ("head_dim", "v_dim", "dtype", "causal"),
        [
            (192, 128, torch.bfloat16, True),
            (192, 128, torch.float32, False),
            (48, 32, torch.float32, True),
            (40, 24, torch.bfloat16, False),
            (40, 24, torch.float32, True),
            (64, 16, torch.float16, True),
            (64, 1, torch.float32, False),
        ],
        ids=str,
    )
    def test_dense(
        self, name: str, head_dim: int, v_dim: int, dtype: torch.dtype, causal: bool
    ) -> None:
        q, k, v, do = inputs(37, 50, head_dim, v_dim, dtype, heads=4, kv_heads=2)
        # Each token's heads together, and other numbers after v's, as where one projection gives
        # v and a part of k.
        q, k, v, do = (rows_of_wider(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v, do))
        scale = head_dim**-0.5
        spec = AttentionSpec(causal=causal, scale=scale)
        flash: Any = BACKENDS[name].target(name=name)
        o, lse = flash.forward(q, k, v, spec)
        found = (o, lse, *flash.backward(do, q, k, v, o, lse, spec))
        assert all(x.dtype == dtype for x in (o, *found[2:]))
        expected = (*exact(q, k, v, causal, scale), *exact_gradients(q, k, v, do, causal, scale))
        assert_all_close(found, expected, CLOSENESS[dtype])

    @pytest.mark.parametrize("name", NAMES)
    def test_packed(self, name: str) -> None:
        lengths = [(40, 40), (5, 9), (17, 35)]
        q, k, v, do = (
            x[0].transpose(0, 1) for x in inputs(62, 84, 40, 24, heads=4, kv_heads=2)
        )  # fmt: skip
        ends = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
        packing = Packing(
            cu_seqlens_q=ends[0].to(DEVICE),
            cu_seqlens_k=ends[1].to(DEVICE),
            max_q_len=40,
            max_kv_len=40,
        )
        spec = AttentionSpec(causal=True, scale=0.3, packing=packing)
        flash: Any = BACKENDS[name].target(name=name)
        o, lse = flash.forward(q, k, v, spec)
        dq, dk, dv = flash.backward(do, q, k, v, o, lse, spec)
        for rows, keys in packing.slices():
            dense = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys], do[rows])]
            expected_o, expected_lse = exact(*dense[:3], True, 0.3)
            expected = (expected_o, expected_lse, *exact_gradients(*dense, True, 0.3))
            parts = (x.transpose(0, 1)[None] for x in (dq[rows], dk[keys], dv[keys]))
            found = (o[rows].transpose(0, 1)[None], lse[None, :, rows], *parts)
            assert_all_close(found, expected, 2e-5)

    def test_parts_of_the_keys_continue_each_other(self) -> None:
        """As a ring attends; the first part's keys are before all queries."""
        q, k, v, _ = inputs(40, 70)
        o = torch.zeros(*q.shape[:-1], v.shape[-1], device=DEVICE)
        lse = torch.full(q.shape[:-1], -torch.inf, device=DEVICE)
        for keys, causal in ((slice(0, 30), False), (slice(30, 70), True)):
            spec = AttentionSpec(causal=causal, scale=0.3)
            flash = backend(implementation="plain")
            o, lse = flash.forward_onto(o, lse, q, k[:, :, keys], v[:, :, keys], spec)
        expected, expected_lse = exact(q, k, v, True, 0.3)
        assert_close(o, expected, "o", 2e-5)
        assert_close(lse, expected_lse, "lse", 2e-5)

    @pytest.mark.parametrize("function", [FlashAttentionTriton, FlashAttentionPyTorch])
    def test_the_course_functions(self, function: Any) -> None:
        Q, K, V, dO = (x[0] for x in inputs(head_dim=16))
        leaves = leaves_of(Q, K.expand_as(Q), V.expand(2, -1, -1))
        O = function.apply(*leaves, True)  # noqa: E741
        q, k, v = (x[None] for x in leaves)
        assert_close(O[None], exact(q, k, v, True, 0.25)[0], "O", 2e-5)
        found = torch.autograd.grad(O, leaves, dO)
        for got, expected in zip(
            found, exact_gradients(q, k, v, dO[None], True, 0.25), strict=True
        ):
            assert_close(got[None], expected, "gradient", 2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": 12, "softcap": 1.5},
        {"causal": True, "prefix_len": 15, "sinks": True},
        {"options": FlashOptions(precision="bf16x6", implementation="plain")},
    ],
    ids=["window and cap", "prefix and sinks", "bf16x6"],
)
def test_as_with_zeros_for_the_other_columns(options: dict[str, Any]) -> None:
    """What masks and precisions give for values as wide as keys is tested elsewhere."""
    q, k, v, do = inputs()
    dlse = randn(1, 2, 37)
    given = dict(options)
    results = []
    for columns in (24, 10):
        wide_v, wide_do = (torch.nn.functional.pad(x, (0, columns - 10)) for x in (v, do))
        leaves = leaves_of(q, k, wide_v)
        if "sinks" in given:
            leaves.append(randn(2).requires_grad_())
            given["sinks"] = leaves[3]
        o, lse = flash_attention(*leaves[:3], return_lse=True, **given)
        assert o.shape[-1] == columns
        gradients = list(torch.autograd.grad((o, lse), leaves, (wide_do, dlse)))
        gradients[2] = gradients[2][..., :10]
        results.append([o[..., :10], lse, *gradients])
    for wide, narrow in zip(*results, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-5, atol=1e-5)


class TestTensors:
    """Those made for results, by us and by PyTorch's tracing."""

    def test_compiles_without_graph_break(self) -> None:
        torch._dynamo.reset()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            o, lse = flash_attention(q * 2, k, v, causal=True, return_lse=True)
            return o.sin(), lse

        q, k, v, do = inputs()
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        results = []
        for function in (attend, compiled):
            leaves = leaves_of(q, k, v)
            found = function(*leaves)
            results.append([*found, *torch.autograd.grad(found, leaves, (do, do[..., 0]))])
        assert_all_close(results[1], results[0], 1e-5)

    def test_operators_keep_pytorchs_rules(self) -> None:
        q, k, v, do = inputs(q_len=5, kv_len=5)
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        rest = (True, 0.3, None, None, 0, 0, "ieee", "auto", False)
        forward, backward = (
            getattr(torch.ops.attnbench, f"flash_{name}").default
            for name in ("forward", "backward")
        )
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        leaves = leaves_of(q, k, v)
        torch.library.opcheck(forward, (*leaves, *rest, None, None), test_utils=checks)
        checks = ("test_schema", "test_faketensor")
        earlier = (torch.zeros_like(do), torch.zeros(q.shape[:-1], device=DEVICE))
        torch.library.opcheck(forward, (q, k, v, *rest, *earlier), test_utils=checks)
        o, lse, _ = forward(q, k, v, *rest, None, None)
        gradient = (q, k, v, *rest, do, o, lse, None)
        torch.library.opcheck(backward, gradient, test_utils=checks)

    def test_results_into_tensors_that_there_are(self) -> None:
        q, k, v, do = inputs()
        spec = AttentionSpec(causal=True, scale=0.25)
        o, lse = backend().forward(q, k, v, spec)
        into = torch.empty_like(o)
        assert torch.equal(backend().forward_into(into, q, k, v, spec), lse)
        assert torch.equal(into, o)
        places = tuple(map(torch.empty_like, (q, k, v)))
        backend().backward_into(places, do, q, k, v, o, lse, spec)
        expected = backend().backward(do, q, k, v, o, lse, spec)
        assert all(map(torch.equal, places, expected))


class TestFacts:
    def test_equal_widths_have_no_width_of_values(self) -> None:
        q, k, v, _ = inputs()
        narrow, equal = (describe(q, k, x, causal=True) for x in (v, k))
        assert (narrow.value_dim, narrow.v_dim) == (10, 10)
        assert (equal.value_dim, equal.v_dim) == (None, 24)

    @pytest.mark.parametrize("columns", [0, 25])
    def test_values_wider_than_keys(self, columns: int) -> None:
        q, k, _, _ = inputs()
        words = f"^v has {columns} columns: must have 1 to 24, no more than k$"
        with pytest.raises(ValueError, match=words):
            flash_attention(q, k, k.new_zeros(*k.shape[:-1], columns))

    def test_tensors_that_do_not_fit(self) -> None:
        q, k, v, _ = inputs(5, 5)
        spec = AttentionSpec(causal=True, scale=0.3)
        flash = backend()
        with pytest.raises(
            ValueError, match=r"v is \[1, 1, 4, 10\]: must be \[1, 1, 5, 10\], like k"
        ):
            flash.forward(q, k, v[:, :, 1:], spec)
        o, lse = flash.forward(q, k, v, spec)
        with pytest.raises(ValueError, match=r"do is \[1, 2, 5, 24\]: must be \[1, 2, 5, 10\]"):
            flash.backward(q, q, k, v, o, lse, spec)
        with pytest.raises(ValueError, match=r"o is \[1, 2, 5, 24\] .* must be \[1, 2, 5, 10\]"):
            flash.forward_into(torch.empty_like(q), q, k, v, spec)
        with pytest.raises(ValueError, match=r"o is \[1, 2, 5, 24\] .* must be \[1, 2, 5, 10\]"):
            flash.forward_onto(torch.zeros_like(q), lse, q, k, v, spec)

    def test_sums_of_dq_are_asked_for_by_the_width_of_do(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        monkeypatch.setattr(dispatch, "_choose", lambda problem, *_: asked.append(problem))
        q, k, _, do = inputs(5, 5)
        blocks = [QueryBlock(0, 5, 5, AttentionSpec(causal=True, scale=0.3))]
        arguments = (q, k, do, torch.zeros(q.shape[:-1], device=DEVICE), blocks, DEFAULT_OPTIONS)
        assert dispatch.query_gradient(do, *arguments) is None
        assert [problem.value_dim for problem in asked] == [10]
        with pytest.raises(ValueError, match="v has 25 columns: must have 1 to 24"):
            dispatch.query_gradient(do.new_zeros(1, 2, 5, 25), *arguments)
