"""Scores of thousands in float32: as near to float64 as PyTorch's softmax of the same scores.

The scores lie around a large constant, which cancels in the softmax. Where the scale is a power of
two they are numbers that float32 has, and nothing of them needs to be lost.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact_attention import exact, exact_gradients
from torch import Tensor
from triton_device import DEVICE, RUNS_TRITON, randn

from kernels import Packing
from kernels.flash import flash_attention, operator
from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.problem import AttentionSpec

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]

OPTIONS = FlashOptions(precision="ieee")

FLOOR = 2e-7
"""Error relative to the norm that float32 sums may have anyway."""

GRADIENT_FLOOR = 3e-7
"""The same of gradients, which two sums lead to."""

SHIFTS = (0.0, 3e3, -3e3, 4e4)
SCALES = (0.25, 0.3, -0.25)


def inputs(shift: float, scale: float) -> tuple[Tensor, ...]:
    """q, k, v, do; q k^T is a multiple of 1/64 below 2^18, about shift / scale."""
    q, k = (randn(1, 2, 50, 16, seed=seed).mul(8).round().div(8) for seed in (1, 2))
    q[..., -1], k[..., -1] = round(shift / scale / 16), 16.0
    return q, k, randn(1, 2, 50, 16, seed=3), randn(1, 2, 50, 16, seed=4)


def by_softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """PyTorch's, in float32."""
    hidden = torch.ones(50, 50, dtype=torch.bool, device=DEVICE).triu(1)
    scores = q @ k.mT * scale
    return (scores.masked_fill(hidden, -torch.inf) if causal else scores).softmax(-1) @ v


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return flash_attention(q, k, v, causal=causal, scale=scale, options=OPTIONS)


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.detach().double() - expected).norm() / expected.norm())


def assert_as_near(
    got: Tensor, theirs: Tensor, expected: Tensor, what: str, floor: float = FLOOR
) -> None:
    """At most 1.1 times as far from ``expected`` as PyTorch's."""
    allowed = max(1.1 * off(theirs, expected), floor)
    assert off(got, expected) <= allowed, f"{what}: {off(got, expected):.3g} > {allowed:.3g}"


def assert_rounded_once(got: Tensor, expected: Tensor) -> None:
    """Within half the distance of float32 numbers there, and a little for the logarithm."""
    size = expected.abs().float()
    steps = (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).double()
    assert bool(((got.double() - expected).abs() <= 0.51 * steps + 3e-7).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shift", SHIFTS)
def test_output_and_lse(shift: float, scale: float, causal: bool) -> None:
    q, k, v, _ = inputs(shift, scale)
    o, lse = flash_attention(
        q, k, v, causal=causal, scale=scale, return_lse=True, options=OPTIONS
    )  # fmt: skip
    expected, expected_lse = exact(q, k, v, causal, scale)
    assert_as_near(o, by_softmax(q, k, v, causal, scale), expected, "o")
    if abs(scale) == 0.25:
        assert off(o, expected) < FLOOR, "nothing of these scores needs to be lost"
        assert_rounded_once(lse, expected_lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shift", SHIFTS)
def test_gradients(shift: float, scale: float, causal: bool) -> None:
    *tensors, do = inputs(shift, scale)
    found = []
    for attend in (ours, by_softmax):
        leaves = [x.clone().requires_grad_() for x in tensors]
        found.append(torch.autograd.grad(attend(*leaves, causal, scale), leaves, do))
    wanted = exact_gradients(*tensors, do, causal, scale)
    for name, got, theirs, expected in zip(("dq", "dk", "dv"), *found, wanted, strict=True):
        # Along the constant entry of the keys dq is the sum of a row's gradients, which is zero.
        columns = slice(0, 15) if name == "dq" else slice(None)
        near = (x[..., columns] for x in (got, theirs, expected))
        assert_as_near(*near, name, GRADIENT_FLOOR)


@pytest.mark.parametrize("shift", SHIFTS)
def test_sinks_as_large_as_the_scores(shift: float) -> None:
    *tensors, do = inputs(shift, 0.25)
    sinks = torch.tensor([shift, shift + 2.5], device=DEVICE)
    leaves = [x.clone().requires_grad_() for x in tensors]
    o = flash_attention(*leaves, causal=True, scale=0.25, sinks=sinks, options=OPTIONS)
    found = torch.autograd.grad(o, leaves, do)
    wanted = [x.double().requires_grad_() for x in tensors]
    o_of_keys, lse = exact(*wanted, True, 0.25)
    expected = o_of_keys * torch.sigmoid(lse - sinks.double()[:, None])[..., None]
    assert off(o, expected.detach()) < 1e-6
    gradients = torch.autograd.grad(expected, wanted, do.double())
    for name, got, want in zip(("dq", "dk", "dv"), found, gradients, strict=True):
        columns = slice(0, 15) if name == "dq" else slice(None)
        assert off(got[..., columns], want[..., columns]) < 1e-6, name


def through_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As torch.compile sees it."""
    spec = AttentionSpec(causal=True, scale=0.25)
    call = FlashCall(q=q, k=k, v=v, spec=spec, options=OPTIONS)
    return operator.flash_forward(*operator._flat(call), None, None)[0]


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts = torch.tensor([0, 20, 50], dtype=torch.int32, device=DEVICE)
    packing = Packing(cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=30, max_kv_len=30)
    tensors = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    o = flash_attention(*tensors, causal=True, scale=0.25, packing=packing, options=OPTIONS)
    return o.transpose(0, 1).unsqueeze(0)


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(
        q, k, v, causal=True, scale=0.25, return_lse=True, options=OPTIONS
    )[0]  # fmt: skip


@pytest.mark.parametrize("attend", [through_operator, packed, with_lse])
def test_every_way_to_a_gradient_knows_the_rest_of_lse(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    *tensors, do = inputs(4e4, 0.25)
    parts = [slice(0, 20), slice(20, 50)] if attend is packed else [slice(0, 50)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = torch.autograd.grad(attend(*leaves), leaves, do)
    for rows in parts:
        wanted = exact_gradients(*(x[:, :, rows] for x in (*tensors, do)), True, 0.25)
        for name, got, expected in zip(("dq", "dk", "dv"), found, wanted, strict=True):
            assert off(got[:, :, rows, :15], expected[..., :15]) < GRADIENT_FLOOR, name


def test_a_merged_lse_has_no_rest() -> None:
    """The backward pass from a float32 lse alone, as a ring has it: off by its steps."""
    q, k, v, do = inputs(3e3, 0.25)
    call = FlashCall(q=q, k=k, v=v, spec=AttentionSpec(causal=True, scale=0.25), options=OPTIONS)
    o, lse = operator.forward(call)
    found = operator.backward(call, do, o, lse)
    for got, expected in zip(found, exact_gradients(q, k, v, do, True, 0.25), strict=True):
        # Half the distance of float32 numbers at 3e3.
        assert off(got, expected) < 1.3e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_keep_nothing_more(dtype: torch.dtype) -> None:
    q, k, v, _ = (x.to(dtype).requires_grad_() for x in inputs(0.0, 0.25))
    options = FlashOptions(implementation="plain")
    o = flash_attention(q, k, v, causal=True, scale=0.25, options=options)
    assert [x is None for x in o.grad_fn.saved_tensors] == [False] * 5 + [True]


@pytest.mark.parametrize("shift", SHIFTS)
def test_continued_from_an_accumulator(shift: float) -> None:
    """The weight of what was summed before is that of the lse that is given, to the last digit."""
    q, k, v, _ = inputs(shift, 0.25)
    spec = AttentionSpec(causal=False, scale=0.25)
    before, after = (
        FlashCall(q=q, k=k[:, :, keys], v=v[:, :, keys], spec=spec, options=OPTIONS)
        for keys in (slice(0, 30), slice(30, 50))
    )
    o, lse = operator.forward(before)
    found = operator.forward(after, (o.clone(), lse.clone()))
    new_o, new_lse = exact(q, k[:, :, 30:], v[:, :, 30:], False, 0.25)
    expected_lse = torch.logaddexp(lse.double(), new_lse)
    shares = [(x - expected_lse).exp()[..., None] for x in (lse.double(), new_lse)]
    assert off(found[0], shares[0] * o + shares[1] * new_o) < FLOOR
    assert_rounded_once(found[1], expected_lse)


def test_an_accumulator_without_further_keys_stays_as_it_is() -> None:
    q, k, v, _ = inputs(4e4, 0.25)
    call = FlashCall(q=q, k=k, v=v, spec=AttentionSpec(causal=False, scale=0.25), options=OPTIONS)
    none = FlashCall(
        q=q, k=k[:, :, :0], v=v[:, :, :0], spec=call.spec, options=OPTIONS
    )  # fmt: skip
    o, lse = operator.forward(call)
    again = operator.forward(none, (o.clone(), lse.clone()))
    assert torch.equal(again[0], o)
    assert torch.equal(again[1], lse)
