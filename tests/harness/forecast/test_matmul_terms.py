"""Terms of matrix products: waves of tiles, and sums that are split."""

from __future__ import annotations

import pytest

from harness.forecast.matmul import matmul_features, quantised

SMS = 132


def test_a_small_result_with_long_sums_is_split_over_the_multiprocessors() -> None:
    features = matmul_features(SMS, 4)
    few = 512.0, 1280.0, 5120.0
    whole, _ = quantised(*few, SMS)
    # 40 tiles of 128 x 128: two thirds of the multiprocessors would idle.
    assert features(few)[1] * 1e9 < 0.75 * whole
    assert features(few)[1] * 1e9 > 2 * 512 * 1280 * 5120


def test_large_products_and_short_sums_are_not_split() -> None:
    for shape in ((8192.0, 8192.0, 8192.0), (512.0, 1280.0, 64.0)):
        whole, waves = quantised(*shape, SMS)
        _, flops, found, _ = matmul_features(SMS, 4)(shape)
        assert (flops * 1e9, found) == pytest.approx((whole, waves), rel=0.03)
