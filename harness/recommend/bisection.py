"""The largest number that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TOLERANCE = 0.02
"""Relative gap that a search by dear trials leaves."""


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


@dataclass(kw_only=True, slots=True, frozen=True)
class Edge:
    """The largest number that was found to fit."""

    number: int
    """0 if not even 1 fits."""
    is_sure: bool
    """Whether a number little larger was tried and does not fit."""


def edge_near(fits: Callable[[int], bool], guess: int, most: int) -> Edge:
    """Like :func:`largest`, where each trial is dear and a good guess is at hand.

    Tries the guess, goes on by tenths, and halves the gap to within :data:`TOLERANCE`. ``fits``
    raises TimeoutError where no trial is left; what was found until then is returned.
    """
    low, high = 0, most + 1
    number = min(max(1, guess), most)
    try:
        while high - low > max(1, TOLERANCE * low):
            if fits(number):
                low = number
            else:
                high = number
            if high > most:
                number = min(most, low + low // 10)
            elif not low:
                number = high - 1 - high // 10
            else:
                number = (low + high) // 2
            number = max(low + 1, number)
    except TimeoutError:
        return Edge(number=low, is_sure=False)
    return Edge(number=low, is_sure=True)
