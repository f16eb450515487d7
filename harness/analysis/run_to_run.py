"""The level of a machine: how much the time of one case varies from process to process.

A process keeps its memory addresses, its place on the cores and what it compiled for as long as it
lives, so that the rounds of one process say nothing about the next (Kalibera and Jones, ISMM 2013,
levels of repetition; Mytkowicz et al., "Producing wrong data without doing anything obviously
wrong", ASPLOS 2009). The level is estimated from every case whose rounds were measured in several
processes: the variance between the means of processes, less what rounds within one process
explain, pooled over cases. Sweep ``run_to_run`` measures some cases for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.intervals import FEWEST_ROUNDS, Side
from harness.analysis.verdicts import Level

SHORT_MS = 1.0
"""Shorter cases are often bound by their host, which varies far more than the device."""

ASSUMED = {True: Level(std_log=0.25, df=30), False: Level(std_log=0.05, df=30)}
"""Levels of a machine without calibration, of short cases and of others. In the committed records
54 phases of the same code were measured twice, hours apart, on one kind of GPU: those under 1 ms
differ like a level of 0.20, others like 0.0004; but GPUs of that kind were seen to run a sweep at
clocks 12% apart, which a level of 0.05 allows for."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Repeated:
    """One case, and which process measured each of its rounds."""

    rounds_ms: Sequence[Sequence[float]]
    processes: Sequence[int]
    host: str | None = None
    device: str | None = None

    @property
    def calibrates(self) -> bool:
        return len(set(self.processes)) >= FEWEST_ROUNDS and len(self.processes) == len(
            self.rounds_ms
        )

    @property
    def median_ms(self) -> float:
        return float(np.median([np.median(samples) for samples in self.rounds_ms]))


Key = tuple[str | None, str | None, bool]


def is_short(median_ms: float) -> bool:
    return median_ms < SHORT_MS


def run_to_run_levels(cases: Iterable[Repeated]) -> dict[Key, Level]:
    """The calibrated levels by host, device, and whether cases are short."""
    groups: dict[Key, list[Repeated]] = {}
    for case in cases:
        if case.calibrates and all(len(samples) for samples in case.rounds_ms):
            key = (case.host, case.device, is_short(case.median_ms))
            groups.setdefault(key, []).append(case)
    return {key: run_to_run_level(group) for key, group in groups.items()}


def run_to_run_level(cases: Sequence[Repeated]) -> Level:
    """The level of cases of one machine, each measured in at least three processes.

    Cases that shared their processes are not independent of each other: a process that is slow is
    slow for all of them. The degrees of freedom are then those of one case.
    """
    found = [_between_processes(case) for case in cases]
    weights = np.array([number - 1.0 for _, number in found])
    variance = float(np.average([variance for variance, _ in found], weights=weights))
    num_processes = len({process for case in cases for process in case.processes})
    df = max(float(weights.max()), float(num_processes - len(cases)))
    return Level(
        std_log=math.sqrt(variance),
        df=df,
        num_processes=num_processes,
        num_cases=len(cases),
        host=cases[0].host,
        device=cases[0].device,
    )


def _between_processes(case: Repeated) -> tuple[float, int]:
    """The variance of log time between processes, and the number of processes.

    Where no process measured two rounds, what varies from round to round is a part of it.
    """
    side = Side.of(case.rounds_ms, case.processes)
    owners = np.array(side.processes)
    by_process = [side.values[owners == owner] for owner in dict.fromkeys(side.processes)]
    means = np.array([values.mean() for values in by_process])
    variance = float(means.var(ddof=1))
    several = [values for values in by_process if len(values) > 1]
    if several:
        squares = sum(float(((values - values.mean()) ** 2).sum()) for values in several)
        within = squares / sum(len(values) - 1 for values in several)
        variance -= within * float(np.mean([1 / len(values) for values in by_process]))
    return max(variance, 0.0), len(by_process)
