"""Windows, prefixes, shifts and caps in the Hopper backward kernels, against float64 on the GPU.

o and lse are the reference's own, rounded, so that nothing here depends on the forward kernel.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from kernels.flash import operator
from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.flash.hopper import backward_schedule, plans
from kernels.problem import AttentionSpec, Mask, Packing

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="needs a CUDA device of compute capability 9.0"),
]

CAP = 5.0
"""On scores, in most tests: each kernel is compiled for the caps that it gets."""
HEAD_DIMS = (64, 96, 128, 192, 256)

each_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS, scope="module")
"""Tests of one head_dim follow each other, as many of their kernels are the same."""
WINDOWS = (1, 7, 64, 127, 128, 200, 254, 255, 1000)
LENGTHS = ((1100, 1100), (333, 777), (777, 333))
"""Of queries and keys."""


def visible(mask: Mask, q_len: int, kv_len: int) -> Tensor:
    """Which query sees which key, [q_len, kv_len], pair by pair."""
    query = torch.arange(q_len, device="cuda")[:, None]
    key = torch.arange(kv_len, device="cuda")[None, :]
    p = query + kv_len - q_len + mask.shift
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    if mask.causal:
        seen &= key <= p
    if mask.window is not None:
        seen &= (p - key).abs() < mask.window
    return seen | (key < mask.prefix_len)


def exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv in float64 by autograd; rows without keys are zero, lse -inf."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group_size = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = q @ keys.mT * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    seen = visible(spec.mask, q.shape[2], k.shape[2])
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    o = (scores - finite.unsqueeze(-1)).exp() @ values
    results, gradients = [o], [do.double()]
    if dlse is not None:
        results.append(finite)
        gradients.append(dlse.double())
    return o.detach(), lse.detach(), *torch.autograd.grad(results, (q, k, v), gradients)


def excess(got: Tensor, expected: Tensor) -> Tensor:
    """How far a gradient is off as a whole: one number, at most 1."""
    return (got.double() - expected).norm() / (5e-3 * expected.norm() + 1e-3)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def call_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> FlashCall:
    return FlashCall(q=q, k=k, v=v, spec=spec, options=FlashOptions(implementation="hopper"))


def check(
    spec: AttentionSpec,
    lengths: tuple[int, int],
    head_dim: int,
    *,
    value_dim: int | None = None,
    heads: tuple[int, int] = (4, 2),
    has_dlse: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    strength: float = 1.0,
    repeats: int = 2,
) -> None:
    """Gradients near float64, with the same bits each time.

    Args:
        value_dim: columns of values, if they are fewer than head_dim.
        heads: of queries and of keys.
        strength: factor of the queries, for scores that a cap is felt by.
    """
    torch.manual_seed(1)
    q_len, kv_len = lengths
    widths = head_dim, value_dim or head_dim
    q, do = (randn(1, heads[0], q_len, width, dtype=dtype) for width in widths)
    k, v = (randn(1, heads[1], kv_len, width, dtype=dtype) for width in widths)
    q = (q * strength).to(dtype)
    dlse = randn(1, heads[0], q_len, dtype=torch.float32) if has_dlse else None
    o, lse, *expected = exact(q, k, v, do, dlse, spec)
    o, lse = o.to(dtype), lse.float()
    call = call_of(q, k, v, spec)
    first = operator.backward(call, do, o, lse, dlse)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(repeats - 1):
        again = operator.backward(call, do, o, lse, dlse)
        for one, other in zip(again, first, strict=True):
            same &= (one == other).all()
    unseen = (lse == -torch.inf).unsqueeze(-1)
    hidden = first[0].masked_fill(~unseen, 0.0).abs().max()
    far = [excess(got, wanted) for got, wanted in zip(first, expected, strict=True)]
    # Processes that share a GPU wait for each other whenever one waits for its results: once here.
    *found, hidden_dq, is_same = torch.stack([*far, hidden.double(), same.double()]).tolist()
    where = f"{spec.mask} softcap={spec.softcap} {lengths} widths {widths}"
    for name, error in zip(("dq", "dk", "dv"), found, strict=True):
        assert error <= 1, f"{name} of {where}: {error:.3g} of its bound"
    assert hidden_dq == 0, f"dq of queries without keys: {where}"
    assert is_same, f"other bits: {where}"


def spec_of(
    causal: bool = True,
    window: int | None = None,
    prefix_len: int = 0,
    shift: int = 0,
    softcap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        causal=causal,
        scale=0.1,
        window=window,
        prefix_len=prefix_len,
        shift=shift,
        softcap=softcap,
    )


def check_windows(head_dim: int, causal: bool) -> None:
    for window in WINDOWS:
        for lengths in (*LENGTHS, (3, 2), (129, 129), (1500, 1500)):
            check(spec_of(causal, window), lengths, head_dim)


@each_head_dim
@pytest.mark.parametrize("causal", [True, False])
def test_windows(causal: bool, head_dim: int) -> None:
    check_windows(head_dim, causal)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_windows_in_many_rounds(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    """Halves of a turn are added at once then."""
    monkeypatch.setattr(backward_schedule, "halves_apart", lambda problem: False)
    monkeypatch.setattr(plans, "BACKWARD_PLANS", {})
    check_windows(head_dim, causal=True)


@each_head_dim
def test_prefixes(head_dim: int) -> None:
    for prefix_len in (1, 128, 333, 500):
        for lengths in LENGTHS:
            check(spec_of(prefix_len=prefix_len), lengths, head_dim)
    check(spec_of(prefix_len=200, shift=-400), (777, 777), head_dim)


@each_head_dim
def test_shifts(head_dim: int) -> None:
    """Queries that see all keys, or none because their keys lie in another part."""
    for shift in (-900, -777, -100, -1, 3, 400, 900):
        check(spec_of(shift=shift), (777, 777), head_dim)
        check(spec_of(window=200, shift=shift), (777, 777), head_dim)
        check(spec_of(causal=False, window=65, shift=shift), (777, 333), head_dim)


@each_head_dim
@pytest.mark.parametrize(
    "mask", [{}, {"causal": False}, {"window": 200}, {"prefix_len": 200}], ids=str
)
def test_caps(mask: dict, head_dim: int) -> None:
    """Scores have a standard deviation of 0.3 head_dim^(1/2): 2.4 to 4.8."""
    for softcap in (CAP, 50.0) if mask == {} else (CAP,):
        spec = spec_of(**mask, softcap=softcap)
        for lengths in LENGTHS:
            check(spec, lengths, head_dim, strength=3.0)


@each_head_dim
def test_gradients_of_lse(head_dim: int) -> None:
    for spec in (
        spec_of(window=7),
        spec_of(causal=False, window=200),
        spec_of(prefix_len=200),
        spec_of(shift=-100),
        spec_of(window=200, softcap=CAP),
    ):
        for lengths in LENGTHS:
            check(spec, lengths, head_dim, has_dlse=True)


@each_head_dim
def test_float16(head_dim: int) -> None:
    check(spec_of(window=200), (777, 777), head_dim, dtype=torch.float16)
    check(spec_of(softcap=CAP), (777, 777), head_dim, dtype=torch.float16)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        ({"shift": -100}, {"has_dlse": True}),
        ({"shift": -900}, {}),
        ({"shift": 400}, {"has_dlse": True}),
        ({"window": 1}, {}),
        ({"window": 200}, {"has_dlse": True}),
        ({"causal": False, "window": 65, "shift": -100}, {}),
        ({"causal": False, "window": 1000}, {"has_dlse": True}),
        ({"prefix_len": 128}, {}),
        ({"prefix_len": 200, "shift": -400}, {"has_dlse": True}),
        ({"softcap": CAP}, {"has_dlse": True, "strength": 3.0}),
        ({}, {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_values_narrower_than_keys(mask: dict, options: dict) -> None:
    for lengths in LENGTHS:
        check(spec_of(**mask), lengths, 192, value_dim=128, **options)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(136, 8), (160, 72)])
def test_other_values_narrower_than_keys(head_dim: int, value_dim: int) -> None:
    for lengths in LENGTHS:
        check(spec_of(), lengths, head_dim, value_dim=value_dim, has_dlse=True)
    check(spec_of(causal=False), (777, 777), head_dim, value_dim=value_dim, heads=(4, 4))
    check(spec_of(window=200), (777, 777), head_dim, value_dim=value_dim)


@pytest.mark.parametrize(("head_dim", "parts"), [(64, 1), (64, 4), (128, 2), (192, 4), (256, 1)])
def test_many_runs_end_and_agree(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, parts: int
) -> None:
    """Programs wait for one another: enough of them, often enough, of one query head and more."""
    monkeypatch.setattr(backward_schedule, "num_parts", lambda problem: parts)
    monkeypatch.setattr(plans, "BACKWARD_PLANS", {})
    for spec in (
        spec_of(window=1000),
        spec_of(window=100),
        spec_of(causal=False, window=300),
        spec_of(window=500, shift=-700),
        spec_of(prefix_len=700),
        spec_of(softcap=CAP),
    ):
        check(spec, (3000, 3000), head_dim, heads=(8, 2), repeats=30)
    check(spec_of(causal=False, window=300), (3000, 1000), head_dim, heads=(8, 2), repeats=30)


@each_head_dim
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_that_nobody_sees_are_not_read(causal: bool, head_dim: int) -> None:
    """No number in them, of keys or of queries, reaches a result; keys that nobody sees get 0."""
    torch.manual_seed(4)
    # The first query stands at 900: keys before 773, whole tiles before 768, are out of sight.
    q, do = (randn(1, 2, 200, head_dim) for _ in range(2))
    k, v = (randn(1, 2, 1100, head_dim) for _ in range(2))
    spec = spec_of(causal, window=128)
    o, lse, *_ = exact(q, k, v, do, None, spec)
    o, lse = o.bfloat16(), lse.float()
    clean = operator.backward(call_of(q, k, v, spec), do, o, lse)
    k[:, :, :768] = torch.nan
    v[:, :, :768] = torch.nan
    dirty = operator.backward(call_of(q, k, v, spec), do, o, lse)
    assert all(map(torch.equal, clean, dirty))
    assert not dirty[1][:, :, :773].any()
    assert not dirty[2][:, :, :773].any()
    # Queries stand between -300 and 799 at 200 keys: those from 563 on see none, nor do early ones.
    q, do = (randn(1, 2, 1100, head_dim) for _ in range(2))
    k, v = (randn(1, 2, 200, head_dim) for _ in range(2))
    spec = spec_of(causal, window=64, shift=600)
    o, lse, *_ = exact(q, k, v, do, None, spec)
    o, lse = o.bfloat16(), lse.float()
    assert lse[0, 0, [200, 563]].tolist() == [-torch.inf] * 2
    clean = operator.backward(call_of(q, k, v, spec), do, o, lse)
    for x in (q, do):
        x[:, :, :128] = torch.nan
        x[:, :, 640:] = torch.nan
    dirty = operator.backward(call_of(q, k, v, spec), do, o, lse)
    assert all(map(torch.equal, clean, dirty))
    assert not dirty[0][:, :, 563:].any()


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("causal", [True, False])
def test_packed(causal: bool, head_dim: int) -> None:
    """Sequences of their own lengths, some empty, each aligned to its own end."""
    q_lengths, kv_lengths = (300, 1, 0, 513, 64, 100), (300, 40, 30, 400, 500, 0)
    torch.manual_seed(2)
    q_ends, k_ends = ([0, *accumulate(x)] for x in (q_lengths, kv_lengths))
    packing = Packing(
        cu_seqlens_q=torch.tensor(q_ends, dtype=torch.int32, device="cuda"),
        cu_seqlens_k=torch.tensor(k_ends, dtype=torch.int32, device="cuda"),
        max_q_len=max(q_lengths),
        max_kv_len=max(kv_lengths),
    )
    q, do = (randn(q_ends[-1], 4, head_dim) for _ in range(2))
    k, v = (randn(k_ends[-1], 2, head_dim) for _ in range(2))
    masks = [{"window": 1}, {"window": 70}, {"window": 200, "shift": -30}, {"softcap": CAP}]
    if causal:
        masks += [{"prefix_len": 35}, {"shift": -60}]
    for mask in masks:
        own = AttentionSpec(causal=causal, scale=0.1, **mask)  # type: ignore[arg-type]
        o = torch.zeros_like(q)
        lse = torch.full((4, q_ends[-1]), -torch.inf, device="cuda")
        wanted = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
        for queries, keys in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
            if queries[0] == queries[1] or keys[0] == keys[1]:
                continue
            slices = [slice(*queries), slice(*keys), slice(*keys), slice(*queries)]
            parts = [
                x[i].transpose(0, 1).unsqueeze(0)
                for x, i in zip((q, k, v, do), slices, strict=True)
            ]
            part_o, part_lse, *gradients = exact(*parts, None, own)
            o[slices[0]] = part_o[0].transpose(0, 1).to(o.dtype)
            lse[:, slices[0]] = part_lse[0].float()
            for x, i, gradient in zip(wanted, slices[:3], gradients, strict=True):
                x[i] = gradient[0].transpose(0, 1)
        packed = AttentionSpec(causal=causal, scale=0.1, packing=packing, **mask)  # type: ignore[arg-type]
        got = operator.backward(call_of(q, k, v, packed), do, o, lse)
        for name, x, y in zip(("dq", "dk", "dv"), got, wanted, strict=True):
            assert excess(x, y) <= 1, f"{name} with {mask}"
        assert not got[0][(lse == -torch.inf).T].any()
