"""Statistics of latency samples: robust summaries, and whether two medians really differ.

Latencies have a hard floor and a long tail, so the median and the interquartile range are
reported first; mean and sample standard deviation stand beside them because many published
tables use them. Samples of several ranks become one series by the maximum over ranks in each
iteration: the group is as slow as its slowest member.

The ratio of two medians comes with a percentile bootstrap interval (Efron and Tibshirani, An
Introduction to the Bootstrap, chapter 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95
SAME_BETWEEN_RUNS = 0.02
"""The same for two runs, whose clocks, temperatures and addresses differ; samples of one run say
nothing about that, so no interval holds it."""

FINE_RESAMPLES, FINEST_CONFIDENCE = 10_000, 0.999
"""Used for many comparisons at once: five resamples lie beyond each end of the widest interval."""

SEED = 336
SAME_WITHIN = 0.01
"""Medians closer than this are called the same, however narrow the interval."""

UNCLEAR_BEYOND = 0.10
"""An interval that holds 1 and reaches further from it than this leaves open what is true."""

STATISTICS = ("median_ms", "q1_ms", "q3_ms", "iqr_ms", "mean_ms", "std_ms", "min_ms")


def slowest_rank(samples_ms: Sequence[Sequence[float]]) -> list[float]:
    """The maximum over ranks of each iteration that every rank has a sample of."""
    if len(samples_ms) == 1:
        return list(samples_ms[0])
    return [max(iteration) for iteration in zip(*samples_ms, strict=False)]


def median(samples: Sequence[float]) -> float:
    return float(np.median(samples))


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """First and third quartile, interpolated linearly between samples."""
    low, high = np.quantile(samples, [0.25, 0.75])
    return float(low), float(high)


def mean(samples: Sequence[float]) -> float:
    return float(np.mean(samples))


def summarise(series: Sequence[Sequence[float]]) -> dict[str, Floats]:
    """The :data:`STATISTICS` of many series at once; NaN where a series is empty.

    One sample has no spread. Series of one length are stacked, so that thousands of them cost a
    few numpy calls.
    """
    result = {name: np.full(len(series), np.nan) for name in STATISTICS}
    for rows, stacked in by_length(series):
        first, middle, third = np.quantile(stacked, [0.25, 0.5, 0.75], axis=1)
        result["median_ms"][rows] = middle
        result["q1_ms"][rows], result["q3_ms"][rows] = first, third
        result["mean_ms"][rows] = stacked.mean(axis=1)
        result["min_ms"][rows] = stacked.min(axis=1)
        if stacked.shape[1] > 1:
            result["iqr_ms"][rows] = third - first
            result["std_ms"][rows] = stacked.std(axis=1, ddof=1)
    return result


def median_ratios(
    numerators: Sequence[Sequence[float]],
    denominators: Sequence[Sequence[float]],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> tuple[Floats, Floats, Floats]:
    """Ratios of medians, and the ends of their bootstrap intervals, pair by pair.

    Both sides are resampled independently. Deterministic: equal samples give equal intervals.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    ratio, low, high = (np.full(len(pairs), np.nan) for _ in range(3))
    tail = (1 - confidence) / 2
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, (above, below) in enumerate(pairs):
        if len(above) and len(below):
            shapes.setdefault((len(above), len(below)), []).append(index)
    for (above_size, below_size), members in shapes.items():
        for start in range(0, len(members), 500):
            rows = members[start : start + 500]
            top = np.sort(np.array([pairs[row][0] for row in rows], dtype=float), axis=1)
            bottom = np.sort(np.array([pairs[row][1] for row in rows], dtype=float), axis=1)
            ratio[rows] = np.median(top, axis=1) / np.median(bottom, axis=1)
            resampled = _resampled_medians(top, above_size, 0, resamples)
            resampled /= _resampled_medians(bottom, below_size, 1, resamples)
            low[rows], high[rows] = np.quantile(resampled, [tail, 1 - tail], axis=1)
    return ratio, low, high


def verdict(ratio: float, low: float, high: float, same_within: float = SAME_WITHIN) -> str:
    """The verdict on a speed-up: time of the baseline over time of the candidate.

    FASTER or SLOWER; SAME where the interval holds 1, or the ratio is within ``same_within`` of
    it; UNCLEAR where the interval holds 1 and is so wide that the two may as well differ.
    """
    if low <= 1 <= high:
        reach = max(1 - low, high - 1)
        return "UNCLEAR" if reach > max(UNCLEAR_BEYOND, same_within) else "SAME"
    if abs(ratio - 1) <= same_within:
        return "SAME"
    return "FASTER" if ratio > 1 else "SLOWER"


def verdict_rule(same_within: float = SAME_WITHIN) -> str:
    """A caption's sentence on when :func:`verdict` says SAME and UNCLEAR."""
    reach = max(UNCLEAR_BEYOND, same_within)
    return (
        f"SAME where the interval holds 1 or the ratio is within {100 * same_within:g}% of it, but "
        f"UNCLEAR where the interval holds 1 and reaches over {100 * reach:g}% from it"
    )


def _resampled_medians(ordered: Floats, size: int, stream: int, resamples: int) -> Floats:
    lower, upper = _median_positions(size, stream, resamples)
    return (ordered[:, lower] + ordered[:, upper]) / 2


@lru_cache(maxsize=256)
def _median_positions(size: int, stream: int, resamples: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The positions, in ordered samples, of the two middle values of each resample.

    Resampling positions of the ordered samples and ordering those is the same as resampling
    the samples; the draws then serve every series of this length.
    """
    random = np.random.default_rng([SEED, size, stream])
    positions = np.sort(random.integers(0, size, (resamples, size)), axis=1)
    return positions[:, (size - 1) // 2], positions[:, size // 2]


def by_length(series: Sequence[Sequence[float]]) -> list[tuple[list[int], Floats]]:
    """Series of one length stacked to ``[series, samples]``, with their positions; no empty one."""
    lengths: dict[int, list[int]] = {}
    for index, samples in enumerate(series):
        if len(samples):
            lengths.setdefault(len(samples), []).append(index)
    return [
        (rows, np.array([series[row] for row in rows], dtype=float)) for rows in lengths.values()
    ]
