"""Whether one case is faster than another: a verdict from the rounds of both.

Samples of one round share the clocks, the neighbours and the memory addresses of that round, so
that they say nothing about the next one. The unit is therefore the round, and its value the
logarithm of its median (Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013;
Georges, Buytaert and Eeckhout, OOPSLA 2007). Where several processes measured several rounds each,
the unit is the process. The interval of the ratio is Welch's ("The generalization of Student's
problem", Biometrika 1947), or that of the differences round by round where rounds were taken in
turns and it is narrower; each spends its part of the error rate, so that the narrower may be used.

Other processes on a CPU only ever delay a pass, and on two busy cores they delay all passes of some
rounds tenfold. Where they were busy, the fastest passes of rounds may decide where medians do not,
at half of the error rate each (Chen and Revels, "Robust benchmarking in noisy environments", 2016):
whether one side is faster, and not that both are the same. Of equal cases that take turns in random
order either is as likely to have the fastest pass of a round, whatever delays them, so that the
sign test holds (:data:`LOOKS_AT_FASTEST`).

FASTER and SLOWER need the whole interval beyond a band of equivalence, SAME needs it wholly within
(Schuirmann, "two one-sided tests", 1987); everything else is UNCLEAR. Rounds may be added to what
is UNCLEAR: each look at the data spends its part of one error rate (:data:`LOOKS`; Lan and DeMets,
"Discrete sequential boundaries for clinical trials", 1983, here with Bonferroni's bound), which
holds over all looks together.

Between runs the unit is the run. One run on each side shows no spread between runs, so that the
machine's own level (:mod:`harness.analysis.run_to_run`) is added to the interval's variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from harness.analysis.intervals import (
    CONTINUED,
    FEWEST_ROUNDS,
    Floats,
    Rounds,
    Side,
    continued,
    fastest_passes,
    half_width,
    interval_of_median,
    most_beyond,
    width_of,
)
from harness.analysis.student import two_sided_quantile

EQUIVALENCE = 0.01
"""Times closer than this are the same for every purpose that a table has."""

ERROR_RATE = 0.02
"""The rate, over all looks, at which equal cases may be called FASTER or SLOWER. It is a bound for
noise far wider than the band; noise of 3% per round comes to a quarter of it."""

LOOKS = (5, 7, 10, 14, 20, 28, 40, 56)
"""The numbers of rounds at which ``until=decided`` looks."""

FIRST_LOOK = 0.6
"""The first look's part of the error rate; the later ones share the rest evenly."""

MOST_ROUNDS = 56
MOST_TOLD = 1001
"""Stands for more rounds than anybody counts."""

LOOKS_AT_FASTEST = {14: 0.2, 28: 0.4, 56: 0.4}
"""The looks, by their numbers of rounds, that may decide by fastest passes, and the part of their
error rate that each spends: few looks leave each of them more."""

BY_FASTEST_PASS = "by the fastest pass of each round, since other processes kept the CPUs busy"
MORE = "interleave=5 or until=decided measures what a verdict needs"


@dataclass(kw_only=True, slots=True, frozen=True)
class Level:
    """How much the time of one case varies from process to process on one machine."""

    std_log: float
    """Standard deviation of log time between processes: 0.02 is 2%."""
    df: float
    """Degrees of freedom of that estimate."""
    num_processes: int = 0
    """The processes that it was calibrated in; 0 where it is assumed."""
    num_cases: int = 0
    host: str | None = None
    device: str | None = None

    @property
    def between_two(self) -> tuple[float, float]:
        """The variance of the difference of two runs in log time, and its degrees of freedom."""
        return 2 * self.std_log**2, self.df

    @property
    def percent(self) -> str:
        return _percent(self.std_log)

    @property
    def words(self) -> str:
        """``a run-to-run level of 0.8% (3 cases in 5 processes)``."""
        how = (
            f"{self.num_cases} case{'' if self.num_cases == 1 else 's'} in {self.num_processes} "
            "processes"
            if self.num_processes
            else "assumed: this machine has no calibration"
        )
        return f"a run-to-run level of {self.percent} ({how})"


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """A word with what it rests on."""

    word: str
    """FASTER, SLOWER, SAME or UNCLEAR: the candidate against the baseline."""
    ratio: float
    """Time of the baseline over time of the candidate: more than 1 is faster."""
    low: float
    high: float
    """The ends of the ratio's interval; NaN where there are too few rounds for one."""
    num_rounds: int
    """Rounds of the side that has fewer."""
    band: float
    """The band that the interval was held against: 0.01 is 1%."""
    why: str = ""
    """For UNCLEAR: what is missing. :data:`BY_FASTEST_PASS` where that decided, else empty."""
    needed: int = 0
    """For UNCLEAR: about how many rounds would tell, at most :data:`MOST_TOLD`. 0 otherwise."""


def decide(
    baseline: Rounds,
    candidate: Rounds,
    *,
    band: float = EQUIVALENCE,
    looks: int = 1,
    paired: bool = True,
    baseline_processes: Sequence[int] = (),
    candidate_processes: Sequence[int] = (),
    level: Level | None = None,
    busy: bool = False,
) -> Verdict:
    """The verdict on a candidate.

    Args:
        band: of equivalence; widened to ``level`` where the rounds do not show that level.
        looks: how often these rounds have been looked at, this time included; see
            :func:`looks_at`.
        paired: whether the rounds of both were taken in turns. Rounds that only one side has are
            then left out.
        baseline_processes, candidate_processes: by round, which process measured it.
        level: of the machine. The interval is widened by it unless both were measured in turns, in
            the same processes or in at least :data:`FEWEST_ROUNDS` each.
        busy: whether other processes delayed passes of either side, on a CPU.

    Returns:
        UNCLEAR where either side has fewer than :data:`FEWEST_ROUNDS` rounds with samples.
    """
    sides = [
        Side.of(rounds, processes)
        for rounds, processes in (
            (baseline, baseline_processes),
            (candidate, candidate_processes),
        )
    ]
    num_rounds = min(len(side.values) for side in sides)
    if not num_rounds:
        return _unclear(math.nan, 0, band, "no samples")
    if paired:
        sides = [side.first(num_rounds) for side in sides]
    shift = float(sides[0].values.mean() - sides[1].values.mean())
    if num_rounds < FEWEST_ROUNDS:
        many = "one round" if num_rounds == 1 else f"{num_rounds} rounds"
        return _unclear(math.exp(shift), num_rounds, band, f"{many}; {MORE}")
    together = paired and sides[0].processes == sides[1].processes
    shown = paired and all(side.num_processes >= FEWEST_ROUNDS for side in sides)
    if level is not None and not shown:
        band = max(band, level.std_log)
    weigh = partial(
        _weigh,
        alpha=alpha_of(looks) / (2 if busy and paired else 1),
        band=band,
        paired=paired,
        inflation=CONTINUED if continued(sides) else 1.0,
        level=None if shown or together else level,
    )
    by_medians = weigh(sides)
    if by_medians.word != "UNCLEAR" or not (busy and paired):
        return by_medians
    return _by_fastest(sides, by_medians, alpha_of_fastest(looks) / 2)


def _weigh(
    sides: list[Side],
    *,
    alpha: float,
    band: float,
    paired: bool,
    inflation: float,
    level: Level | None,
) -> Verdict:
    """The verdict by the values of both sides' rounds, at an error rate of ``alpha``."""
    units = [side.units() for side in sides]
    shift = float(units[0].mean() - units[1].mean())
    half = half_width(
        units,
        [side.floor for side in sides],
        alpha,
        paired=paired,
        inflation=inflation,
        level=level.between_two if level else None,
    )
    low, high = shift - half, shift + half
    edge = math.log1p(band)
    word, why, needed = "UNCLEAR", "", 0
    if low > edge:
        word = "FASTER"
    elif high < -edge:
        word = "SLOWER"
    elif -edge < low and high < edge:
        word = "SAME"
    else:
        why, needed = _what_it_takes(
            units, abs(shift), edge, alpha, inflation=inflation, level=level
        )
    return Verdict(
        word=word,
        ratio=math.exp(shift),
        low=math.exp(low),
        high=math.exp(high),
        num_rounds=min(len(side.values) for side in sides),
        band=band,
        why=why,
        needed=needed,
    )


def _by_fastest(sides: list[Side], by_medians: Verdict, alpha: float) -> Verdict:
    """The verdict by the fastest passes of rounds, where medians leave it open."""
    edge = math.log1p(by_medians.band)
    ahead = fastest_passes(sides)
    interval = interval_of_median(ahead, alpha)
    if interval is not None and (interval[0] > edge or interval[1] < -edge):
        low, high = interval
        return replace(
            by_medians,
            word="FASTER" if low > edge else "SLOWER",
            ratio=math.exp(float(median(ahead))),
            low=math.exp(low),
            high=math.exp(high),
            why=BY_FASTEST_PASS,
            needed=0,
        )
    agreeing = max(int((ahead > edge).sum()), int((ahead < -edge).sum()))
    needed = _fastest_needed(by_medians.num_rounds, len(ahead), agreeing)
    return replace(by_medians, needed=min(by_medians.needed, needed))


def _fastest_needed(num_rounds: int, num_kept: int, agreeing: int) -> int:
    """At how many rounds fastest passes would tell, if as large a part went on to agree."""
    for number, part in LOOKS_AT_FASTEST.items():
        kept = num_kept * number // num_rounds
        beyond = most_beyond(kept, ERROR_RATE / 2 * part)
        differing = kept * (num_kept - agreeing) / num_kept
        if number > num_rounds and beyond is not None and differing <= beyond:
            return number
    return MOST_TOLD


def alpha_of(looks: int) -> float:
    """The part of the error rate that a look spends; all looks together spend no more than it."""
    if looks <= 1:
        return ERROR_RATE * FIRST_LOOK
    return ERROR_RATE * (1 - FIRST_LOOK) / (len(LOOKS) - 1)


def alpha_of_fastest(looks: int) -> float:
    """:func:`alpha_of` for fastest passes, before it is halved."""
    if looks <= 1:
        return ERROR_RATE
    rounds = LOOKS[looks - 1] if looks <= len(LOOKS) else 0
    return ERROR_RATE * LOOKS_AT_FASTEST.get(rounds, 0.0)


def looks_at(num_rounds: int, *, until_decided: bool) -> int:
    """The look of a case that has this many rounds: the first where their number was fixed."""
    if not until_decided:
        return 1
    return 1 + sum(rounds < num_rounds for rounds in LOOKS)


def more_rounds(num_rounds: int, most_rounds: int = MOST_ROUNDS) -> int:
    """How many rounds to add to a pair that is UNCLEAR before the next look; 0 for no more."""
    later = [rounds for rounds in LOOKS if num_rounds < rounds <= most_rounds]
    return later[0] - num_rounds if later else 0


def rule(band: float = EQUIVALENCE) -> str:
    """A caption's sentence on when :func:`decide` says which word."""
    return (
        f"FASTER and SLOWER where the whole interval lies beyond {100 * band:.3g}% from 1, SAME "
        "where all of it lies within, UNCLEAR otherwise"
    )


def interval_words() -> str:
    """A caption's words for the interval."""
    return (
        f"the interval of {100 * (1 - alpha_of(1)):.3g}% by Student's t over rounds, whose values "
        "are their medians"
    )


def _what_it_takes(
    units: list[Floats],
    shift: float,
    edge: float,
    alpha: float,
    *,
    inflation: float,
    level: Level | None,
) -> tuple[str, int]:
    """Why a verdict is open, and about how many rounds would close it."""
    margin = abs(shift - edge)
    variance = sum(float(values.var(ddof=1)) for values in units)
    number = min(len(values) for values in units)
    spread = f"{number} rounds that spread by {_percent(math.sqrt(variance / 2))}"
    if inflation > 1:
        spread += " and go on from one another"
    variance *= inflation
    if level is not None:
        alone = width_of([level.between_two], alpha)
        if alone >= margin:
            return f"{level.words} hides it; measure both in turns", MOST_TOLD
    for needed in range(number + 1, MOST_TOLD):
        if two_sided_quantile(alpha, 2.0 * needed - 2) * math.sqrt(variance / needed) < margin:
            return f"{spread}; about {needed} would tell", needed
    return f"{spread}, and a ratio at the edge of the band: over 1,000 would tell", MOST_TOLD


def _unclear(ratio: float, num_rounds: int, band: float, why: str) -> Verdict:
    return Verdict(
        word="UNCLEAR",
        ratio=ratio,
        low=math.nan,
        high=math.nan,
        num_rounds=num_rounds,
        band=band,
        why=why,
    )


def _percent(value: float) -> str:
    return f"{100 * value:.2g}%"
