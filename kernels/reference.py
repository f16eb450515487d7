"""The relative error of a result, and how large it may be where no tighter bound is derived."""

from __future__ import annotations

from torch import Tensor

# Relative error, as a norm over the slice, beyond which a result is wrong rather than rounded.
# Naive bfloat16 attention rounds its probabilities to 8 bits and reaches about 1e-2.
TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 4e-2, "float16": 1e-2}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected|| in float64; infinite if ``got`` is not finite."""
    got = got.double()
    if not bool(got.isfinite().all()):
        return float("inf")
    scale = float(expected.norm())
    difference = float((got - expected).norm())
    # Below rounding, dividing by the norm would compare noise with noise.
    return difference / scale if scale > 1e-12 else difference
