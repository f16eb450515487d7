"""The two sides of a comparison, and the interval of the difference of their means.

The unit is a round, or a process where several measured several rounds each, and its value the
logarithm of its median. See :mod:`harness.analysis.verdicts` for the sources.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harness.analysis.student import two_sided_quantile

Floats = NDArray[np.float64]
Rounds = Sequence[Sequence[float]]
"""Samples by round, of the slowest rank, in any unit of time."""

FEWEST_ROUNDS = 3
"""With two, equal medians of a coarse clock pass for certainty."""

SHORTEST = 1e-9
"""A clock may show no time at all, which has no logarithm; no clock counts as finely as this."""

DIFFERENCES = 0.15
"""The part of a look's error rate that the interval of differences spends."""

CONTINUED = 6.0
"""By how much more the mean of rounds varies than they tell, where each goes on where the last one
ended: over the 4.2 of 5 rounds of 5 samples with an autocorrelation of 0.9, since in one of six
such pairs the samples do not show it."""


@dataclass(slots=True)
class Side:
    """The rounds of one case."""

    logs: list[Floats]
    """Logs of samples, by round."""
    values: Floats
    """The log of each round's median."""
    floors: Floats
    """The variance that the samples within a round alone give to its value."""
    processes: tuple[int, ...]

    @classmethod
    def of(cls, rounds: Rounds, processes: Sequence[int]) -> Side:
        kept = [index for index, samples in enumerate(rounds) if len(samples)]
        times = [np.maximum(np.asarray(rounds[index], dtype=float), SHORTEST) for index in kept]
        logs = [np.log(samples) for samples in times]
        known = len(processes) == len(rounds)
        return cls(
            logs=logs,
            values=np.array([math.log(float(np.median(samples))) for samples in times]),
            floors=np.array([_median_variance(samples) for samples in logs]),
            processes=tuple(processes[index] if known else 0 for index in kept),
        )

    def first(self, number: int) -> Side:
        return Side(
            self.logs[:number],
            self.values[:number],
            self.floors[:number],
            self.processes[:number],
        )

    @property
    def num_processes(self) -> int:
        return len(set(self.processes))

    @property
    def floor(self) -> float:
        """The least variance of a unit, so that a lucky agreement does not pass for certainty."""
        rounds_per_unit = len(self.values) / len(self.units())
        return float(np.median(self.floors)) / rounds_per_unit

    def units(self) -> Floats:
        """Rounds; or processes, where there are enough of them and they measured several rounds."""
        number = self.num_processes
        if not FEWEST_ROUNDS <= number < len(self.values):
            return self.values
        owners = np.array(self.processes)
        return np.array([self.values[owners == owner].mean() for owner in dict.fromkeys(owners)])


def fastest_passes(sides: Sequence[Side]) -> Floats:
    """By round the log of the baseline's fastest pass less that of the candidate's.

    Of two rounds that took turns as many passes count, since the least of more is less. Rounds in
    which one side was delayed from end to end are left out: those whose difference, of either
    sign, is over a factor of 2 and over twice that of the closest quarter.
    """
    baseline, candidate = (side.logs for side in sides)
    found = np.array(
        [
            one[: len(other)].min() - other[: len(one)].min()
            for one, other in zip(baseline, candidate, strict=True)
        ]
    )
    # By the amount alone: a choice that looks at the sign would not leave either as likely.
    amounts = np.abs(found)
    return found[amounts <= max(math.log(2), 2 * float(np.quantile(amounts, 0.25)))]


def interval_of_median(values: Floats, alpha: float) -> tuple[float, float] | None:
    """The interval of the median by the sign test, at an error rate of ``alpha``.

    It holds for any distribution (Thompson, "On confidence ranges for the median and other
    expectation distributions for populations of unknown distribution form", 1936): its ends are
    values that so few lie beyond as one of ``alpha`` of fair coins would give.

    Returns:
        None where there are too few values for any interval.
    """
    beyond = most_beyond(len(values), alpha)
    if beyond is None:
        return None
    ordered = np.sort(values)
    return float(ordered[beyond]), float(ordered[len(values) - 1 - beyond])


def most_beyond(number: int, alpha: float) -> int | None:
    """How many of a number of fair coins may differ from all others, at a rate of ``alpha``.

    None if not even none may.
    """
    rate, beyond = 0.0, -1
    while rate <= alpha:
        beyond += 1
        rate += 2 * math.comb(number, beyond) / 2**number
    return beyond - 1 if beyond else None


def _median_variance(logs: Floats) -> float:
    """The variance of the median of samples, if they were independent and normal."""
    low, high = np.quantile(logs, [0.25, 0.75])
    return float(math.pi / 2 * ((high - low) / 1.349) ** 2 / len(logs))


def continued(sides: Sequence[Side]) -> bool:
    """Whether rounds go on where the last one ended, so that they depend on each other.

    So it is where samples of one round still drift apart at distances that are a good part of it,
    while the end of one round is close to the beginning of the next.
    """
    rounds = [logs for side in sides for logs in side.logs]
    if min(map(len, rounds)) < 4:
        return False
    near = _mean_square(logs[len(logs) // 4 :] - logs[: -(len(logs) // 4)] for logs in rounds)
    ends = [(logs, max(1, len(logs) // 5)) for logs in rounds]
    far = _mean_square(logs[-size:] - logs[:size] for logs, size in ends)
    across = _mean_square(
        later[:1] - earlier[-1:] for side in sides for earlier, later in pairwise(side.logs)
    )
    return far > 1.5 * near and across < far


def _mean_square(parts: Iterable[Floats]) -> float:
    return float(np.mean(np.concatenate(list(parts)) ** 2))


def half_width(
    units: list[Floats],
    floors: list[float],
    alpha: float,
    *,
    paired: bool,
    inflation: float,
    level: tuple[float, float] | None,
) -> float:
    """Half the width of the interval of the difference of two sides' means.

    Args:
        floors: the least variance of a unit, by side.
        paired: whether units of equal place belong together.
        inflation: factor on the variance, for rounds that depend on each other.
        level: a further variance, with its degrees of freedom.
    """
    terms = [
        (inflation * max(float(values.var(ddof=1)), floor) / len(values), len(values) - 1.0)
        for values, floor in zip(units, floors, strict=True)
    ]
    if level is not None:
        return width_of([*terms, level], alpha)
    if not paired or len(units[0]) != len(units[1]):
        return width_of(terms, alpha)
    differences = units[0] - units[1]
    variance = inflation * max(float(differences.var(ddof=1)), sum(floors)) / len(differences)
    return min(
        width_of(terms, alpha * (1 - DIFFERENCES)),
        width_of([(variance, len(differences) - 1.0)], alpha * DIFFERENCES),
    )


def width_of(terms: Sequence[tuple[float, float]], alpha: float) -> float:
    """Half the width for a sum of independent variances, each with its degrees of freedom.

    Source: Satterthwaite, "An approximate distribution of estimates of variance components", 1946.
    """
    total = sum(variance for variance, _ in terms)
    if total == 0:
        return 0.0
    df = total**2 / sum(variance**2 / df for variance, df in terms)
    # Rounding only serves the cache of quantiles.
    return two_sided_quantile(alpha, round(df, 1)) * math.sqrt(total)
