"""The level of a machine: how much the time of one case varies from process to process.

A process keeps its memory addresses, its place on the cores and what it compiled for as long as it
lives, so that the rounds of one process say nothing about the next (Kalibera and Jones, ISMM 2013,
levels of repetition; Mytkowicz et al., "Producing wrong data without doing anything obviously
wrong", ASPLOS 2009). The level is estimated from every case whose rounds were measured in several
processes: the variance between the means of processes, less what varies within one process (its
rounds, or its samples where it measured one round), pooled over cases. Any run with
``interleave=5`` whose rounds have processes of their own gives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.analysis.intervals import FEWEST_ROUNDS, Floats, Side
from harness.analysis.verdicts import Level

SHORT_MS = 1.0
"""Shorter cases vary more: they are over before a processor that they share comes back to them."""

LEAST_DEVIATIONS = 4
"""Processes less one, over all cases of a kind, that a calibration takes: with two, two runs whose
levels differ by 2% were called FASTER or SLOWER in 5%."""

LEAST_SHARE = 0.25
"""Of the variance of processes' means, the part that counts as theirs at least. What a few of them
leave after that within processes is often nothing, which no two runs of a machine keep to."""

ASSUMED = {True: Level(std_log=0.25, df=30), False: Level(std_log=0.05, df=30)}
"""Levels of a machine without calibration, of times that a host may have a part in and of others.
In the committed records 54 phases of the same code were measured twice, hours apart, on one kind of
GPU: those under 1 ms differ like a level of 0.20, others like 0.0004; but GPUs of that kind were
seen to run a sweep at clocks 12% apart, which a level of 0.05 allows for."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Repeated:
    """One case, and which process measured each of its rounds."""

    rounds_ms: Sequence[Sequence[float]]
    processes: Sequence[int]
    host: str | None = None
    device: str | None = None
    hindered: bool = False
    """Whether the device waited for its host in some round."""

    @property
    def calibrates(self) -> bool:
        return len(set(self.processes)) >= FEWEST_ROUNDS and len(self.processes) == len(
            self.rounds_ms
        )

    @property
    def median_ms(self) -> float:
        return float(np.median([np.median(samples) for samples in self.rounds_ms]))


class Kind(NamedTuple):
    """What the level of a case is estimated apart from."""

    host: str | None
    device: str | None
    short: bool
    hindered: bool

    @property
    def words(self) -> str:
        """``under 1 ms where the device waited for its host``."""
        length = "under 1 ms" if self.short else "from 1 ms"
        return f"{length}{' where the device waited for its host' if self.hindered else ''}"


def is_short(median_ms: float) -> bool:
    return median_ms < SHORT_MS


def assumed_level(median_ms: float, hindered: bool | None, device: str) -> Level:
    """The level of a case on a machine that was not calibrated.

    Args:
        hindered: whether the device waited for its host; None if the record does not tell.
        device: cpu, where every time is a host's, or cuda.
    """
    untold = hindered is None or device == "cpu"
    return ASSUMED[bool(hindered) or (untold and is_short(median_ms))]


def level_of(levels: Mapping[Kind, Level], kind: Kind, *, told: bool) -> Level | None:
    """The calibrated level for a case; the larger one if its record does not tell who waited."""
    kinds = [kind] if told else [kind._replace(hindered=hindered) for hindered in (True, False)]
    found = [levels[each] for each in kinds if each in levels]
    return max(found, key=lambda level: level.std_log, default=None)


def run_to_run_levels(cases: Iterable[Repeated]) -> dict[Kind, Level]:
    """The calibrated levels by kind of case.

    Cases whose device waited for its host have levels of their own, so that those of kernels are
    those of kernels.
    """
    groups: dict[Kind, list[Repeated]] = {}
    for case in cases:
        if case.calibrates and all(len(samples) for samples in case.rounds_ms):
            kind = Kind(case.host, case.device, is_short(case.median_ms), case.hindered)
            groups.setdefault(kind, []).append(case)
    return {key: run_to_run_level(group) for key, group in groups.items() if _are_enough(group)}


def _are_enough(cases: Sequence[Repeated]) -> bool:
    """Whether their processes tell a level: one case in three of them says next to nothing."""
    return sum(len(set(case.processes)) - 1 for case in cases) >= LEAST_DEVIATIONS


def run_to_run_level(cases: Sequence[Repeated]) -> Level:
    """The level of cases of one machine, each measured in at least three processes.

    Cases that shared their processes may not be independent of each other: a process that is slow
    may be slow for all of them. The degrees of freedom say as much.
    """
    found = [_Processes.of(case) for case in cases]
    weights = np.array([len(one.means) - 1.0 for one in found])
    variance, scatter = (
        float(np.average(values, weights=weights))
        for values in ([one.variance for one in found], [one.scatter for one in found])
    )
    variance = max(variance, LEAST_SHARE * scatter)
    return Level(
        std_log=math.sqrt(variance),
        df=_degrees_of_freedom(found, weights),
        num_processes=len({process for case in cases for process in case.processes}),
        num_cases=len(cases),
        host=cases[0].host,
        device=cases[0].device,
    )


@dataclass(kw_only=True, slots=True)
class _Processes:
    """One case: the mean log time of each process, and how these means differ."""

    owners: tuple[int, ...]
    means: Floats
    scatter: float
    """The variance of these means."""
    variance: float
    """The part of it that does not come from within processes."""

    @classmethod
    def of(cls, case: Repeated) -> _Processes:
        side = Side.of(case.rounds_ms, case.processes)
        owners = tuple(dict.fromkeys(side.processes))
        rounds = [side.values[np.array(side.processes) == owner] for owner in owners]
        means = np.array([values.mean() for values in rounds])
        several = [values for values in rounds if len(values) > 1]
        within = float(np.median(side.floors))
        if several:
            squares = sum(float(((values - values.mean()) ** 2).sum()) for values in several)
            within = squares / sum(len(values) - 1 for values in several)
        within *= float(np.mean([1 / len(values) for values in rounds]))
        scatter = float(means.var(ddof=1))
        return cls(owners=owners, means=means, scatter=scatter, variance=max(scatter - within, 0.0))


def _degrees_of_freedom(found: Sequence[_Processes], weights: Floats) -> float:
    """Between those of one case, where a process is slow for all, and those of all together.

    Where processes were shared, the variance between the processes' means over all cases tells:
    it is that of one case, or as many times smaller as there are independent cases.
    """
    one_case, together = float(weights.max()), float(weights.sum())
    if len({one.owners for one in found}) > 1:
        apart = len({owner for one in found for owner in one.owners}) - len(found)
        return max(one_case, min(together, float(apart)))
    deviations = np.array([one.means - one.means.mean() for one in found])
    of_one = float((deviations**2).sum()) / together
    of_means = float(deviations.mean(axis=0).var(ddof=1))
    if of_means == 0:
        return together
    return min(together, max(one_case, one_case * of_one / of_means))
