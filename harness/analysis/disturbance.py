"""What disturbed a measurement: the rules, and what a footnote says of each.

A record tells of other work on the host and the device, and of the device's clocks; the samples
tell of two levels, of a slope and of their spread. A rule about samples says what they did, not
why. Thresholds were set on independent log-normal noise of 1% and 5% with 10 to 200 samples, where
each rule about samples but ``spread`` raises an alarm in less than 1% of series
(``tests/harness/analysis/test_disturbance.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.analysis.stats import Floats, by_length
from harness.bench.outcome import BUSY_CPUS
from harness.store.record import Record

CLOCKS_APART = 0.10
"""How far clocks around the rounds of one case may differ, relative to the highest."""

WIDE_SPREAD = 0.10
"""Interquartile range over the median beyond which samples scatter."""

LEAST_CHANGE = 0.03
"""Distance of two levels, and change over a measurement, that are worth a mark."""

LEAST_SAMPLES = 10
"""Fewer samples show neither two levels nor a slope."""

MEANINGS: Mapping[str, str] = {
    "busy": "other processes used the device, or over 10% of the host's CPUs",
    "throttled": "the device lowered its clocks, or they differed by over 10%",
    "bimodal": "the times lie on two levels over 3% apart",
    "drift": "they rose or fell by over 3% from the first third to the last",
    "spread": "their interquartile range is over 10% of the median",
}
"""Each disturbance, in the order of footnotes."""

THROTTLE_REASONS = frozenset(
    {
        "hw_slowdown",
        "hw_thermal_slowdown",
        "sw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "sw_power_cap",
    }
)


def in_order(words: Iterable[str]) -> list[str]:
    """Disturbances without repetition, in the order of footnotes."""
    found = set(words)
    return [word for word in MEANINGS if word in found]


def of_record(record: Record) -> list[str]:
    """Disturbances that the record tells of; nothing where it kept no such state."""
    found = {"busy": was_busy(record), "throttled": was_throttled(record)}
    return [word for word, is_so in found.items() if is_so]


def was_busy(record: Record) -> bool:
    """Whether other processes used the device, or many of the host's CPUs, in any round."""
    loads = (rank.get("load") or {} for state in record.round_states for rank in state.ranks)
    return any(map(is_busy, loads))


def is_busy(load: Mapping[str, Any]) -> bool:
    """Whether others used the device, or many of the host's CPUs, in a round.

    Args:
        load: that of :class:`harness.bench.host_load.LoadWatch`.
    """
    has_company = any(part.get("device_processes") for part in (load, load.get("at_start") or {}))
    return has_company or (load.get("other_cpu_share") or 0) > BUSY_CPUS


def was_throttled(record: Record) -> bool:
    """Whether a rank's device lowered its clocks, or they were far apart between rounds."""
    return any(map(_has_slowed, _moments_by_rank(record)))


def sm_clock_mhz(record: Record) -> float:
    """The SM clock that a case ran at: the median on the rank whose median is lowest, NaN if none.

    The lowest, since the slowest rank sets the pace of all.
    """
    clocks = [_working_clocks(moments) for moments in _moments_by_rank(record)]
    return min((float(np.median(found)) for found in clocks if found), default=float("nan"))


def _moments_by_rank(record: Record) -> list[list[Mapping[str, Any]]]:
    """The states of each rank's device, before and after the case and each of its rounds."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for ranks in (record.device_state, *(state.ranks for state in record.round_states)):
        for rank, moments in enumerate(ranks):
            by_rank.setdefault(rank, []).extend(
                moments.get(moment) or {} for moment in ("before", "after")
            )
    return list(by_rank.values())


def _has_slowed(moments: Sequence[Mapping[str, Any]]) -> bool:
    reasons = [set(moment.get("throttle_reasons") or ()) for moment in moments]
    if any(not THROTTLE_REASONS.isdisjoint(found) for found in reasons):
        return True
    clocks = _working_clocks(moments)
    return bool(clocks) and max(clocks) - min(clocks) > CLOCKS_APART * max(clocks)


def _working_clocks(moments: Sequence[Mapping[str, Any]]) -> list[float]:
    """SM clocks; an idle device rests at low ones, which says nothing about those it works at."""
    return [
        moment["sm_clock_mhz"]
        for moment in moments
        if moment.get("sm_clock_mhz") and "gpu_idle" not in (moment.get("throttle_reasons") or ())
    ]


def of_samples(series: Sequence[Sequence[float]]) -> list[list[str]]:
    """What the samples of each series, in the order they were taken, say of their measurement."""
    found: list[list[str]] = [[] for _ in series]
    for rows, stacked in by_length(series):
        rules = {"bimodal": is_bimodal(stacked), "drift": drifts(stacked), "spread": _wide(stacked)}
        for word, is_so in rules.items():
            for place in np.flatnonzero(is_so):
                found[rows[place]].append(word)
    return found


def is_bimodal(series: Floats) -> NDArray[np.bool_]:
    """Whether the samples in each row of ``[series, samples]`` lie on two levels.

    The split into two groups, each of at least a fifth of the samples, that leaves least variance
    of the logarithms within them (Otsu, 1979, "A threshold selection method from gray-level
    histograms"). Two levels are ``4 + 30 / n`` of the standard deviations that are left apart,
    further than the halves of a normal distribution of n samples come by chance.
    """
    num_samples = series.shape[1]
    if num_samples < LEAST_SAMPLES or (series <= 0).any():
        return np.zeros(len(series), dtype=bool)
    ordered = np.log(np.sort(series, axis=1))
    # Sums of squares around the mean, so that differences of a percent keep their digits.
    ordered -= ordered.mean(axis=1, keepdims=True)
    least = -(-num_samples // 5)
    below = np.arange(least, num_samples - least + 1)
    above = num_samples - below
    sums = np.cumsum(ordered, axis=1)[:, below - 1]
    low, high = sums / below, -sums / above
    total = (ordered**2).sum(axis=1, keepdims=True)
    within = np.maximum(total - below * low**2 - above * high**2, 0) / num_samples
    row, best = np.arange(len(series)), within.argmin(axis=1)
    apart = (high - low)[row, best]
    threshold = (4 + 30 / num_samples) * np.sqrt(within[row, best])
    return (apart > np.log1p(LEAST_CHANGE)) & (apart > threshold)


def drifts(series: Floats) -> NDArray[np.bool_]:
    """Whether the samples in each row of ``[series, samples]`` rose or fell as they were taken.

    Spearman's rank correlation with their order is beyond ``3.3 / sqrt(n - 1)``, which independent
    samples exceed once in a thousand series, and beyond a half; and the median of the last third is
    3% from that of the first.
    """
    num_samples = series.shape[1]
    if num_samples < LEAST_SAMPLES:
        return np.zeros(len(series), dtype=bool)
    ranks = series.argsort(axis=1).argsort(axis=1) - (num_samples - 1) / 2
    order = np.arange(num_samples) - (num_samples - 1) / 2
    correlation = (ranks * order).sum(axis=1) / (order**2).sum()
    third = num_samples // 3
    first, last = (np.median(part, axis=1) for part in (series[:, :third], series[:, -third:]))
    has_moved = np.abs(last - first) > LEAST_CHANGE * np.minimum(first, last)
    beyond = max(0.5, min(0.95, 3.3 / (num_samples - 1) ** 0.5))
    found: NDArray[np.bool_] = has_moved & (np.abs(correlation) > beyond)
    return found


def _wide(series: Floats) -> NDArray[np.bool_]:
    first, middle, third = np.quantile(series, [0.25, 0.5, 0.75], axis=1)
    found: NDArray[np.bool_] = third - first > WIDE_SPREAD * middle
    return found
