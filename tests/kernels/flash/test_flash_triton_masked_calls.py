"""Masked calls of FlashAttention in Triton: packed, in parts, compiled, and what they leave out."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_attention import assert_close, backend, inputs, packed
from torch import Tensor
from triton_device import DEVICE, RUNS_TRITON, randn

from kernels.flash import flash_attention, native
from kernels.flash.any_gpu.configs import INTERPRETER
from kernels.flash.call.arguments import FlashOptions
from kernels.flash.call.problem import MAX_SHIFT, describe
from kernels.problem import AttentionSpec, Mask
from tests.support.attention_by_definition import problem_of
from tests.support.masked_attention import is_seen

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]

LARGEST_TILE = (
    max(max(tile.block_q, tile.block_k) for tile in INTERPRETER.values())
    if DEVICE == "cpu"
    else 128
)


def exact(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse of a dense batch in float64, differentiable; every query sees a key."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    problem = problem_of(
        q_len=q.shape[2],
        kv_len=k.shape[2],
        causal=spec.causal,
        window=spec.window,
        prefix_len=spec.prefix_len,
        shift=spec.shift,
    )
    seen = [[is_seen(problem, i, j) for j in range(k.shape[2])] for i in range(q.shape[2])]
    scores = q @ k.mT * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~torch.tensor(seen, device=q.device), -torch.inf)
    columns = scores
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        columns = torch.cat([scores, sink], -1)
    lse = columns.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def assert_all_close(got: Any, wanted: Any, what: str, limit: float = 2e-5) -> None:
    for index, (x, y) in enumerate(zip(got, wanted, strict=True)):
        assert_close(x, y, f"{what} {index}", limit)


@pytest.mark.parametrize(
    "mask",
    [
        {"causal": True, "window": 12},
        {"causal": False, "window": 9},
        {"causal": True, "prefix_len": 15},
        {"causal": True, "window": 40, "softcap": 1.5},
    ],
)
def test_packed_sequences_have_masks_of_their_own(mask: dict[str, Any]) -> None:
    lengths = [(40, 40), (5, 9), (1, 1), (20, 35)]
    q, k, v, do, packing = packed(lengths)
    sinks = randn(4)
    spec = AttentionSpec(scale=0.3, **mask)
    leaves = leaves_of(q, k, v, sinks)
    o = backend().attend(*leaves[:3], replace(spec, packing=packing, sinks=leaves[3]))
    found = torch.autograd.grad(o, leaves, do)
    wanted = leaves_of(*(x.double() for x in (q, k, v, sinks)))
    parts = []
    for rows, keys in packing.slices():
        dense = (
            x.transpose(0, 1)[None] for x in (wanted[0][rows], *(x[keys] for x in wanted[1:3]))
        )
        parts.append(exact(*dense, spec, wanted[3])[0][0].transpose(0, 1))
    expected = torch.cat(parts)
    assert_close(o, expected, "o", 2e-5)
    assert_all_close(found, torch.autograd.grad(expected, wanted, do.double()), "gradient")


@pytest.mark.parametrize(
    ("window", "softcap"), [(30, None), (50, 2.0), (None, 0.8)], ids=["window", "both", "cap"]
)
def test_parts_of_the_keys_continue_each_other(window: int | None, softcap: float | None) -> None:
    """As a ring attends: a part's queries stand later by the keys that follow it."""
    q, k, v, do = inputs(q_len=60, kv_len=80)
    whole = AttentionSpec(causal=True, scale=0.3, window=window, softcap=softcap)
    first, second = slice(0, 48), slice(48, 80)
    o = torch.zeros(q.shape, device=DEVICE)
    lse = torch.full(q.shape[:-1], -torch.inf, device=DEVICE)
    for keys, shift in ((first, 32), (second, 0)):
        part = (q, k[:, :, keys], v[:, :, keys], replace(whole, shift=shift))
        o, lse = backend(implementation="plain").forward_onto(o, lse, *part)
    leaves = leaves_of(*(x.double() for x in (q, k, v)))
    expected, expected_lse = exact(*leaves, whole)
    assert_all_close((o, lse), (expected, expected_lse), "result")
    sums = [
        backend().backward(do, q, k[:, :, keys], v[:, :, keys], o, lse, replace(whole, shift=shift))
        for keys, shift in ((first, 32), (second, 0))
    ]
    found = (sums[0][0] + sums[1][0], *(torch.cat(x, 2) for x in zip(*sums, strict=True)))
    wanted = torch.autograd.grad(expected, leaves, do.double())
    assert_all_close((found[0], *found[2:]), wanted, "gradient")


class TestTilesOutside:
    """What no query of a tile sees is not read: not a number there would spread."""

    def test_keys_before_the_window(self) -> None:
        window, q_len = 10, 20
        unseen = LARGEST_TILE * 2
        kv_len = unseen + LARGEST_TILE + window + q_len
        q, k, v, do = inputs(q_len=q_len, kv_len=kv_len)
        k[:, :, :unseen] = torch.nan
        v[:, :, :unseen] = torch.nan
        spec = AttentionSpec(causal=True, scale=0.3, window=window)
        o, lse = backend().forward(q, k, v, spec)
        dq, dk, dv = backend().backward(do, q, k, v, o, lse, spec)
        assert all(bool(x.isfinite().all()) for x in (o, lse, dq))
        assert bool((dk[:, :, :unseen] == 0).all())
        assert bool((dv[:, :, :unseen] == 0).all())
        clean = [x[:, :, unseen:] for x in (k, v)]
        assert_all_close((o, lse), exact(q, *clean, spec), "result")

    @pytest.mark.parametrize("causal", [True, False])
    def test_keys_after_the_window_and_queries_on_either_side(self, causal: bool) -> None:
        window = 10
        length = 4 * LARGEST_TILE
        middle = length // 2
        q, k, v, do = inputs(q_len=length, kv_len=length)
        spec = AttentionSpec(causal=causal, scale=0.3, window=window)
        bad = [x.clone() for x in (q, do)]
        for x in bad:
            x[:, :, middle] = torch.nan
        o, lse = backend().forward(bad[0], k, v, spec)
        _, dk, dv = backend().backward(bad[1], bad[0], k, v, o, lse, spec)
        far = LARGEST_TILE + window
        for x in (dk, dv):
            assert bool(x[:, :, : middle - far].isfinite().all())
            assert bool(x[:, :, middle + far :].isfinite().all())
        k[:, :, middle] = torch.nan
        o, lse = backend().forward(q, k, v, spec)
        dq, _, _ = backend().backward(do, q, k, v, o, lse, spec)
        for x in (o, dq):
            assert bool(x[:, :, : middle - far].isfinite().all())
            assert bool(x[:, :, middle + far :].isfinite().all())


class TestCaps:
    def test_beyond_the_scores_it_changes_nothing(self) -> None:
        q, k, v, _ = inputs()
        plain = flash_attention(q, k, v, causal=True, return_lse=True)
        for softcap in (1e4, 1e9, 1e300):
            capped = flash_attention(q, k, v, causal=True, softcap=softcap, return_lse=True)
            assert_all_close(capped, plain, "result", 3e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("scale", [1e4, -1e4, 0.0])
    def test_of_scores_that_overflow_an_exponential(self, scale: float, dtype: torch.dtype) -> None:
        q, k, v, do = inputs(q_len=20, kv_len=20, dtype=dtype)
        leaves = leaves_of(q, k, v)
        o, lse = flash_attention(*leaves, causal=True, softcap=2.0, scale=scale, return_lse=True)
        spec = AttentionSpec(causal=True, scale=scale, softcap=2.0)
        limit = 2e-5 if dtype == torch.float32 else 3e-2
        assert_all_close((o, lse), exact(q, k, v, spec), "result", limit)
        assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(o, leaves, do))


class TestSinks:
    def test_gradients_through_lse(self) -> None:
        q, k, v, do = inputs(q_len=20, kv_len=20)
        sinks = randn(2)
        leaves = leaves_of(q, k, v, sinks)
        results = flash_attention(*leaves[:3], causal=True, sinks=leaves[3], return_lse=True)
        wanted = leaves_of(*(x.double() for x in (q, k, v, sinks)))
        expected = exact(*wanted[:3], AttentionSpec(causal=True, scale=0.25), wanted[3])
        dlse = do[..., 0]
        found = torch.autograd.grad(results, leaves, (do, dlse))
        assert_all_close(results, expected, "result")
        outer = (do.double(), dlse.double())
        assert_all_close(found, torch.autograd.grad(expected, wanted, outer), "gradient")

    def test_alone_may_need_a_gradient(self) -> None:
        q, k, v, do = inputs(q_len=20, kv_len=20)
        sinks = randn(2).requires_grad_()
        (got,) = torch.autograd.grad(flash_attention(q, k, v, sinks=sinks), sinks, do)
        exact_sinks = sinks.detach().double().requires_grad_()
        o, _ = exact(q, k, v, AttentionSpec(causal=False, scale=0.25), exact_sinks)
        assert_close(got, torch.autograd.grad(o, exact_sinks, do.double())[0], "dsinks", 2e-5)


def test_compiles_without_graph_break() -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        windowed, lse = flash_attention(
            q, k, v, causal=True, window=9, softcap=2.0, sinks=sinks, return_lse=True
        )
        return windowed + flash_attention(q, k, v, causal=True, prefix_len=12), lse

    q, k, v, do = inputs(heads=4)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for function in (attend, compiled):
        leaves = leaves_of(q, k, v, randn(4))
        found = function(*leaves)
        results.append([*found, *torch.autograd.grad(found, leaves, (do, do[..., 0]))])
    assert_all_close(results[1], results[0], "compiled", 1e-5)


def test_operators_of_earlier_graphs_run_without_a_mask() -> None:
    """As PyTorch's caches kept their calls: without the arguments that came later."""
    q, k, v, do = inputs(q_len=20, kv_len=20)
    call = (q, k, v, True, 0.25, None, None, 0, 0, "ieee", "auto", False)
    o, lse, _ = torch.ops.attnbench.flash_forward(*call, None, None)
    wanted = leaves_of(q, k, v)
    expected = flash_attention(*wanted, causal=True, options=FlashOptions(precision="ieee"))
    assert torch.equal(o, expected)
    found = torch.ops.attnbench.flash_backward(*call, do, o, lse, None)
    assert_all_close(found, torch.autograd.grad(expected, wanted, do), "gradient", 1e-5)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    masked = (*wanted, *call[3:], None, None, 9, 0, 3, 2.0)
    torch.library.opcheck(torch.ops.attnbench.flash_forward.default, masked, test_utils=checks)


def test_the_compiled_node_is_asked_for_plain_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(native, "is_built", lambda: True)
    monkeypatch.setattr(native, "attend", lambda *arguments: asked.append(True))
    q, k, v = leaves_of(*inputs(q_len=5, kv_len=5)[:3])
    for options in (
        {"window": 2},
        {"prefix_len": 2},
        {"softcap": 2.0},
        {"sinks": torch.zeros(2, device=DEVICE)},
    ):
        flash_attention(q, k, v, causal=True, **options)
        backend().attend(q, k, v, AttentionSpec(causal=True, scale=0.3, **options))
    backend().attend(q, k, v, AttentionSpec(causal=True, scale=0.3, shift=2))
    assert not asked
    flash_attention(q, k, v, causal=True)
    backend().attend(q, k, v, AttentionSpec(causal=True, scale=0.3))
    assert len(asked) == 2


class TestProblem:
    def test_what_is_left_out_changes_nothing(self) -> None:
        draw = random.Random(5)
        num_reduced = 0
        for _ in range(300):
            causal = draw.random() < 0.6
            window = draw.choice((None, 1, 4, 9, 30, 2**40))
            given = Mask(
                causal=causal,
                window=window,
                prefix_len=draw.choice((0, 3, 99)) if causal and window is None else 0,
                shift=draw.randint(-12, 12),
            )
            q_len, kv_len = draw.randint(1, 9), draw.randint(1, 9)
            q, k = torch.empty(1, 1, q_len, 8), torch.empty(1, 1, kv_len, 8)
            numbers = {name: getattr(given, name) for name in ("window", "prefix_len", "shift")}
            reduced = describe(q, k, k, causal=causal, **numbers).mask
            num_reduced += reduced != given
            assert not (reduced.is_plain and reduced.shift)
            assert (reduced.window or 0) <= q_len + kv_len + abs(given.shift)
            # Shorter sequences of a packed batch have the same mask.
            for rows in range(1, q_len + 1):
                for keys in range(1, kv_len + 1):
                    for query in range(rows):
                        wanted = range(*given.keys(query, rows, keys))
                        assert list(range(*reduced.keys(query, rows, keys))) == list(wanted)
        assert num_reduced > 50

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"window": 0}, "window=0: must be at least 1"),
            ({"causal": False, "prefix_len": 3}, "prefix_len=3: needs a causal mask"),
            ({"softcap": 0.0}, r"softcap=0\.0: must be a positive number"),
            ({"softcap": float("inf")}, "softcap=inf: must be a positive number"),
            ({"sinks": torch.zeros(3)}, r"sinks is \[3\] on .*: must be \[2\] on"),
            ({"sinks": [0.0, 1.0]}, r"sinks is list: must be a tensor \[2\]"),
            ({"sinks": torch.zeros(2, dtype=torch.complex64)}, "sinks is torch.complex64: must be"),
            ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks is torch.int64: must be"),
            ({"window": 1.5, "causal": True}, "window=1.5: must be a whole number"),
            ({"window": "abc", "causal": True}, "window=abc: must be a whole number"),
            ({"window": True, "causal": True}, "window=True: must be a whole number"),
            ({"prefix_len": None, "causal": True}, "prefix_len=None: must be a whole number"),
            ({"softcap": "abc"}, "softcap=abc: must be a positive number"),
        ],
    )
    def test_errors(self, options: dict[str, Any], words: str) -> None:
        q, k, v, _ = inputs(q_len=5, kv_len=5)
        with pytest.raises(ValueError, match=words):
            flash_attention(q, k, v, **{"causal": True, **options})

    def test_shifts_stay_within_32_bits(self) -> None:
        q = torch.empty(1, 1, 5, 8)
        with pytest.raises(ValueError, match="must lie within"):
            describe(q, q, q, causal=True, shift=MAX_SHIFT)
