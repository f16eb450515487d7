"""Scores of thousands in float32: as near to float64 as PyTorch's softmax of the same scores.

The scores lie around a large constant, which cancels in the softmax. Where the scale is a power of
two they are numbers that float32 has, and nothing of them needs to be lost, however the keys are
split.
"""

from __future__ import annotations

import pytest
import torch
from decode_checks import int32
from torch import Tensor
from triton_device import DEVICE, RUNS_TRITON, randn

from kernels.decode import flash_decode, mla_decode

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]

FLOOR = 4e-7
"""Error relative to the norm that float32 sums may have anyway."""

KEYS = 70
SHIFTS = (0.0, 3e3, -3e3, 4e4)
SCALES = (0.25, 0.3, -0.25)


def inputs(shift: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one new token; q k^T is a multiple of 1/64 below 2^18, about shift / scale."""
    q, k = (randn(1, 2, n, 16, seed=n).mul(8).round().div(8) for n in (1, KEYS))
    q[..., -1], k[..., -1] = round(shift / scale / 16), 16.0
    return q, k, randn(1, 2, KEYS, 16, seed=3)


def by_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """PyTorch's, in the dtype that is given."""
    return (q @ k.mT * scale).softmax(-1) @ v


def assert_as_near(got: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """At most 1.1 times as far from float64 as PyTorch's in float32."""
    expected = by_softmax(q.double(), k.double(), v.double(), scale)
    off, theirs = (
        float((x.double() - expected).norm() / expected.norm())
        for x in (got, by_softmax(q, k, v, scale))
    )
    assert off <= max(1.1 * theirs, FLOOR), f"o: {off:.3g}, PyTorch's {theirs:.3g}"
    if abs(scale) == 0.25:
        assert off <= FLOOR, "nothing of these scores needs to be lost"


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shift", SHIFTS)
def test_flash_decode(shift: float, scale: float, num_splits: int) -> None:
    q, k, v = inputs(shift, scale)
    past = [torch.full((1, 2, 80, 16), torch.nan, device=DEVICE) for _ in range(2)]
    for cache, x in zip(past, (k, v), strict=True):
        cache[:, :, : KEYS - 1] = x[:, :, :-1]
    o = flash_decode(
        q, k[:, :, -1:], v[:, :, -1:], *past, int32([KEYS - 1]), scale=scale,
        num_splits=num_splits,
    )  # fmt: skip
    assert_as_near(o, q, k, v, scale)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shift", SHIFTS)
def test_mla_decode(shift: float, scale: float, num_splits: int) -> None:
    q, k, _ = inputs(shift, scale)
    latents = k[:, 0].contiguous()
    o = mla_decode(
        q[..., :8].contiguous(), q[..., 8:].contiguous(), latents, int32([KEYS]), scale=scale,
        num_splits=num_splits,
    )  # fmt: skip
    keys = latents[:, None]
    assert_as_near(o, q, keys, keys[..., :8], scale)
