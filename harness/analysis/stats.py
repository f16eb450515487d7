"""Statistics of latency samples: robust summaries.

Latencies have a hard floor and a long tail, so the median and the interquartile range are
reported first; mean and sample standard deviation stand beside them because many published
tables use them. Samples of several ranks become one series by the maximum over ranks in each
iteration: the group is as slow as its slowest member.

Whether two cases differ is decided in :mod:`harness.analysis.verdicts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STATISTICS = ("median_ms", "q1_ms", "q3_ms", "iqr_ms", "mean_ms", "std_ms", "min_ms")


def slowest_rank(samples_ms: Sequence[Sequence[float]]) -> list[float]:
    """The maximum over ranks of each iteration that every rank has a sample of."""
    if len(samples_ms) == 1:
        return list(samples_ms[0])
    return [max(iteration) for iteration in zip(*samples_ms, strict=False)]


def latest_rank(phases: Sequence[Sequence[Sequence[float]]]) -> int:
    """The rank that is furthest behind through phases that follow one another.

    It has the largest sum of the ends of its phases, by their medians: where ranks wait for each
    other at the end of the last, the one that is late before it.

    Args:
        phases: the samples of each phase, one list per rank.
    """
    medians = np.array([[median(samples) for samples in ranks] for ranks in phases])
    return int(np.cumsum(medians, axis=0).sum(axis=0).argmax())


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


def by_round(samples: Sequence[float], lengths: Sequence[int]) -> list[list[float]]:
    """Samples split into rounds of these lengths; one round where they do not add up."""
    if sum(lengths) != len(samples):
        return [list(samples)] if len(samples) else []
    ends = accumulate(lengths)
    return [list(samples[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def round_ends(rounds_ms: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The medians of the fastest and the slowest round; NaN of fewer than three, which tell little.

    The median of all samples lies between them.
    """
    medians = [median(samples) for samples in rounds_ms if len(samples)]
    return (min(medians), max(medians)) if len(medians) >= 3 else (np.nan, np.nan)


def by_length(series: Sequence[Sequence[float]]) -> list[tuple[list[int], Floats]]:
    """Series of one length stacked to ``[series, samples]``, with their positions; no empty one."""
    lengths: dict[int, list[int]] = {}
    for index, samples in enumerate(series):
        if len(samples):
            lengths.setdefault(len(samples), []).append(index)
    return [
        (rows, np.array([series[row] for row in rows], dtype=float)) for rows in lengths.values()
    ]
