"""Quantiles of Student's t distribution, for any positive degrees of freedom.

The tail is half the regularised incomplete beta function I_x(df/2, 1/2) at x = df / (df + t^2)
(Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.1), which its continued fraction
(26.5.8) gives; the quantile is found by halving an interval.
"""

from __future__ import annotations

import math
from functools import lru_cache


def two_sided_tail(t: float, df: float) -> float:
    """The probability that a t-distributed value lies further from zero than ``t``."""
    return _incomplete_beta(df / 2, 0.5, df / (df + t * t))


@lru_cache(maxsize=4096)
def two_sided_quantile(alpha: float, df: float) -> float:
    """The value that |t| exceeds with probability ``alpha``, between 0 and 1."""
    high = 1.0
    while two_sided_tail(high, df) > alpha:
        high *= 2
        if high > 1e12:
            return math.inf
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if two_sided_tail(middle, df) > alpha:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), from the side on which the fraction converges quickly."""
    if x <= 0 or x >= 1:
        return min(1.0, max(0.0, x))
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    scale += a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return value
