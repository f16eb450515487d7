"""The largest number that fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that fits, if all below it do; 0 if 1 does not.

    Doubles until a number does not fit, and halves the gap from there.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
