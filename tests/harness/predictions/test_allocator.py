"""What PyTorch's CUDA allocator counts, by its rules worked out by hand."""

from __future__ import annotations

import pytest

from harness.predictions.allocator import counted_bytes, rounding_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "counted"),
    [
        (1, 512),
        (513, 1024),
        # Five fill a segment of 20 MiB; of two of 9.8 the second keeps the rest of theirs.
        (4 * MIB, 4 * MIB),
        (9.765625 * MIB, 10 * MIB),
        # Two of 7 MiB leave 6, which others get.
        (7 * MIB, 7 * MIB),
        # Segments of one tensor are multiples of 2 MiB, and lose more than 1 MiB to others.
        (39.0625 * MIB, 40 * MIB),
        (38.5 * MIB, 38.5 * MIB),
        (100 * MIB, 100 * MIB),
    ],
)
def test_by_hand(size: float, counted: float) -> None:
    assert counted_bytes(size) == counted


def test_rounding_is_what_is_beyond_the_tensors() -> None:
    assert rounding_bytes([39.0625 * MIB, 100 * MIB, 1]) == 0.9375 * MIB + 511
