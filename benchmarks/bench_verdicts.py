"""How often a verdict is wrong, and how often it finds a difference, under noise of known kinds.

``python -m benchmarks.bench_verdicts [--pairs 2000]`` draws pairs of equal cases, and pairs of
which one takes 5% longer, and prints how often they are called FASTER, SLOWER and SAME. It exits
with 1 where a floor is missed:

- equal cases are called FASTER or SLOWER in at most 2% for each kind of noise and each number of
  samples per round;
- 5% are found in 95% where rounds differ by 1%, with 5 rounds;
- 5% are found in 80% where rounds differ by 3%, with ``until=decided``. With 5 rounds no procedure
  that is wrong in at most 2% reaches that: the best, which knows the spread, reaches the share that
  is printed beside;
- 5% are never called SAME.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from harness.analysis.run_to_run import Repeated, run_to_run_level
from harness.analysis.verdicts import (
    EQUIVALENCE,
    MOST_ROUNDS,
    Level,
    Verdict,
    decide,
    looks_at,
    more_rounds,
)

Floats = NDArray[np.float64]
Random = np.random.Generator

ROUNDS = 5
SAMPLES = (5, 20, 100)
PLANTED = 0.05
MOST_FALSE, LEAST_FOUND_AT_1, LEAST_FOUND_AT_3 = 0.02, 0.95, 0.80
CALIBRATION_CASES, CALIBRATION_PROCESSES = 4, 5
JITTER = 0.005
"""Independent noise of each sample, where a model is about something else."""


def independent(random: Random, rounds: int, samples: int, spread: float) -> Floats:
    return spread * random.standard_normal((2, rounds, samples))


def heavy_tail(random: Random, rounds: int, samples: int) -> Floats:
    """A floor with a Pareto tail of index 1.5, whose variance is infinite."""
    return np.asarray(np.log1p(0.01 * random.pareto(1.5, (2, rounds, samples))))


def bimodal(random: Random, rounds: int, samples: int, *, per_round: bool) -> Floats:
    shape = (2, rounds, 1 if per_round else samples)
    modes = 0.08 * (random.random(shape) < 0.5)
    return modes + independent(random, rounds, samples, JITTER)


def autocorrelated(random: Random, rounds: int, samples: int, *, shared: bool) -> Floats:
    """3% with a correlation of 0.9 from sample to sample, on from each round to the next.

    Args:
        shared: one series through the turns of both sides, as it is where the machine varies;
            otherwise each side goes on where its own last round ended.
    """
    length = rounds * samples
    if shared:
        series = _walk(random, 1, 2 * length)[0]
        return np.asarray(series.reshape(rounds, 2, samples).transpose(1, 0, 2))
    return _walk(random, 2, length).reshape(2, rounds, samples)


def _walk(random: Random, number: int, length: int, rho: float = 0.9) -> Floats:
    steps = random.standard_normal((number, length))
    series = np.empty_like(steps)
    series[:, 0] = steps[:, 0]
    for index in range(1, length):
        series[:, index] = rho * series[:, index - 1]
        series[:, index] += math.sqrt(1 - rho**2) * steps[:, index]
    return 0.03 * series


def drift(random: Random, rounds: int, samples: int) -> Floats:
    """3% from the first round to the last, whichever side has its turn."""
    trend = np.linspace(0, 0.03, 2 * rounds * samples).reshape(rounds, 2, samples)
    return trend.transpose(1, 0, 2) + independent(random, rounds, samples, JITTER)


def own_level(
    random: Random, rounds: int, samples: int, spread: float, *, per_run: bool = False
) -> Floats:
    levels = spread * random.standard_normal((2, 1 if per_run else rounds, 1))
    return levels + independent(random, rounds, samples, JITTER)


def delayed(random: Random, rounds: int, samples: int) -> Floats:
    """Passes of 1 ms on a CPU that others use too: most wait for turns of 4 ms."""
    turns = random.geometric(0.3, (2, rounds, samples)) - 1
    waits = 4.0 * turns * random.uniform(0.5, 1, (2, rounds, 1))
    return np.log(np.exp(independent(random, rounds, samples, JITTER)) + waits)


Draw = Callable[[Random, int, int], Floats]


@dataclass(kw_only=True, frozen=True)
class Noise:
    """One kind of noise: log times of two sides as [side, round, sample]."""

    name: str
    draw: Draw
    busy: bool = False
    """Whether other processes delay passes, and the load says so."""
    between_runs: bool = False
    """Whether the two sides are runs of their own, of which one shows nothing of the next."""

    def pair(self, random: Random, samples: int, slower: float) -> Verdict:
        logs = self.draw(random, ROUNDS, samples)
        logs[0] += math.log1p(slower)
        baseline, candidate = _rounds(logs)
        if not self.between_runs:
            return decide(baseline, candidate, busy=self.busy)
        level = self.calibrated(random, samples)
        return decide(baseline, candidate, paired=False, level=level)

    def calibrated(self, random: Random, samples: int) -> Level:
        """The level as a user gets it, from some cases in a few processes."""
        cases = []
        for _ in range(CALIBRATION_CASES):
            runs = [self.draw(random, 1, samples)[0] for _ in range(CALIBRATION_PROCESSES)]
            rounds = [list(10 * np.exp(run[0])) for run in runs]
            cases.append(Repeated(rounds_ms=rounds, processes=range(CALIBRATION_PROCESSES)))
        return run_to_run_level(cases)


def _rounds(logs: Floats) -> tuple[list[list[float]], list[list[float]]]:
    one, other = (10 * np.exp(logs)).tolist()
    return one, other


NOISES = (
    Noise(name="log-normal 1%", draw=lambda *of: independent(*of, 0.01)),
    Noise(name="log-normal 5%", draw=lambda *of: independent(*of, 0.05)),
    Noise(name="heavy tail", draw=heavy_tail),
    Noise(name="bimodal 8%", draw=lambda *of: bimodal(*of, per_round=False)),
    Noise(name="bimodal 8%, by round", draw=lambda *of: bimodal(*of, per_round=True)),
    Noise(name="autocorrelated 3%", draw=lambda *of: autocorrelated(*of, shared=True)),
    Noise(name="autocorrelated 3%, by side", draw=lambda *of: autocorrelated(*of, shared=False)),
    Noise(name="drift of 3%", draw=drift),
    Noise(name="a level per round, 3%", draw=lambda *of: own_level(*of, 0.03)),
    Noise(name="turns on a busy CPU", draw=delayed, busy=True),
    Noise(
        name="a level per run, 2%",
        draw=lambda *of: own_level(*of, 0.02, per_run=True),
        between_runs=True,
    ),
)


@dataclass(kw_only=True)
class Report:
    """Rows as they are printed, and the floors that were missed."""

    missed: list[str]

    def row(self, *cells: object, widths: Sequence[int]) -> None:
        print(
            "  ".join(
                f"{cell!s:>{abs(width)}}" if width > 0 else f"{cell!s:<{-width}}"
                for cell, width in zip(cells, widths, strict=True)
            )
        )

    def hold(self, name: str, holds: bool) -> None:
        if not holds:
            self.missed.append(name)


def words(verdicts: Sequence[Verdict]) -> Counter[str]:
    return Counter(verdict.word for verdict in verdicts)


def share(count: int, total: int) -> str:
    return f"{100 * count / total:.4g}%"


WIDTHS = (-27, 8, 15, 6, 8, 9, 9)


def false_and_found(report: Report, pairs: int, seed: int) -> None:
    """Equal pairs, and pairs 5% apart, for each kind of noise and number of samples."""
    print(f"{pairs} pairs each, {ROUNDS} rounds, band {100 * EQUIVALENCE:g}%")
    header = ("noise", "samples", "equal: F or S", "SAME", "5%: found", "wrong way", "SAME")
    report.row(*header, widths=WIDTHS)
    for number, noise in enumerate(NOISES):
        for samples in SAMPLES:
            random = np.random.default_rng([seed, number, samples])
            equal = words([noise.pair(random, samples, 0.0) for _ in range(pairs)])
            apart = words([noise.pair(random, samples, PLANTED) for _ in range(pairs)])
            false = equal["FASTER"] + equal["SLOWER"]
            counts = (false, equal["SAME"], apart["FASTER"], apart["SLOWER"], apart["SAME"])
            cells = (share(count, pairs) for count in counts)
            report.row(noise.name, samples, *cells, widths=WIDTHS)
            where = f"{noise.name}, {samples} samples per round"
            report.hold(f"{where}: {false} of {pairs} false", false <= MOST_FALSE * pairs)
            report.hold(f"{where}: 5% called SAME", not apart["SAME"])


def until_decided(random: Random, spread: float, slower: float, most_rounds: int) -> Verdict:
    """A pair to which rounds are added as a run adds them."""
    logs = np.empty((2, 0, 20))
    added = ROUNDS
    while True:
        new = own_level(random, added, 20, spread)
        new[0] += math.log1p(slower)
        logs = np.concatenate([logs, new], axis=1)
        number = logs.shape[1]
        found = decide(*_rounds(logs), looks=looks_at(number, until_decided=True))
        added = more_rounds(number, most_rounds)
        if found.word != "UNCLEAR" or not added:
            return found


def power(report: Report, pairs: int, seed: int) -> None:
    """What 5 rounds find, and what rounds until decided do, where rounds differ by 1% and 3%."""
    widths = (-27, 16, 16, 8, 22, 12)
    print()
    report.row(
        "5% apart, a level per round", "found, 5 rounds", "best possible", "SAME",
        "found, until decided", "mean rounds", widths=widths,
    )  # fmt: skip
    for spread, least, added in ((0.01, LEAST_FOUND_AT_1, False), (0.03, LEAST_FOUND_AT_3, True)):
        random = np.random.default_rng([seed, round(1000 * spread)])
        fixed = [until_decided(random, spread, PLANTED, ROUNDS) for _ in range(pairs)]
        longer = [until_decided(random, spread, PLANTED, MOST_ROUNDS) for _ in range(pairs)]
        short, long = words(fixed), words(longer)
        found = (long if added else short)["FASTER"]
        report.row(
            f"{100 * spread:g}%",
            share(short["FASTER"], pairs),
            f"{100 * best_possible(spread):.0f}%",
            share(short["SAME"] + long["SAME"], 2 * pairs),
            share(long["FASTER"], pairs),
            f"{np.mean([verdict.num_rounds for verdict in longer]):.1f}",
            widths=widths,
        )
        report.hold(f"5% found in {found} of {pairs} at {spread:.0%}", found >= least * pairs)
        report.hold(f"5% called SAME at {spread:.0%}", not short["SAME"] + long["SAME"])
    print(
        f"At 3% the floor of {LEAST_FOUND_AT_3:.0%} is for until=decided, with at most "
        f"{MOST_ROUNDS} rounds: {ROUNDS} rounds are too few for any procedure."
    )
    random = np.random.default_rng([seed, 0])
    false = [until_decided(random, 0.03, 0.0, MOST_ROUNDS) for _ in range(pairs)]
    wrong = words(false)["FASTER"] + words(false)["SLOWER"]
    print(f"Equal cases at 3% until decided: {share(wrong, pairs)} FASTER or SLOWER.")
    report.hold(f"until decided: {wrong} of {pairs} false", wrong <= MOST_FALSE * pairs)


def best_possible(spread: float) -> float:
    """The power of the best test of size 2% that knows the spread, without any band."""
    normal = NormalDist()
    distance = math.log1p(PLANTED) / (spread * math.sqrt(2 / ROUNDS))
    return normal.cdf(distance - normal.inv_cdf(1 - MOST_FALSE / 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="pairs per row (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = Report(missed=[])
    false_and_found(report, options.pairs, options.seed)
    power(report, options.pairs, options.seed)
    for name in report.missed:
        print(f"missed: {name}", file=sys.stderr)
    print("\nEvery floor holds." if not report.missed else f"\n{len(report.missed)} floors missed.")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
