"""Verdicts from rounds, against known quantiles, counted coverage and symmetries."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from harness.analysis.student import two_sided_quantile, two_sided_tail
from harness.analysis.verdicts import (
    BY_FASTEST_PASS,
    ERROR_RATE,
    LOOKS,
    Level,
    Verdict,
    alpha_of,
    decide,
    looks_at,
    more_rounds,
)


def rounds(
    random: np.random.Generator,
    *,
    shift: float = 0.0,
    spread: float = 0.01,
    number: int = 5,
) -> list[list[float]]:
    """Rounds of 9 samples with a level of their own, about 10 ms."""
    levels = spread * random.standard_normal((number, 1))
    samples = 10 * np.exp(shift + levels + 0.002 * random.standard_normal((number, 9)))
    return [list(row) for row in samples]


@pytest.mark.parametrize(
    ("alpha", "df", "quantile"),
    # Abramowitz and Stegun, table 26.10.
    [(0.05, 1, 12.706), (0.05, 4, 2.776), (0.01, 8, 3.355), (0.002, 10, 4.144), (0.05, 100, 1.984)],
)
def test_quantiles_are_those_of_printed_tables(alpha: float, df: float, quantile: float) -> None:
    assert two_sided_quantile(alpha, df) == pytest.approx(quantile, abs=6e-4)


def test_tails_in_closed_form() -> None:
    for t in (0.1, 1.0, 7.0):
        assert two_sided_tail(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t))
        assert two_sided_tail(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t))
    normal = NormalDist().inv_cdf(1 - 0.003)
    assert two_sided_quantile(0.006, 1e7) == pytest.approx(normal, rel=1e-5)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(1)
    missed = 0
    for _ in range(1000):
        # As wide as the band is narrow, so that the rate is the interval's own.
        found = decide(rounds(random, spread=0.1), rounds(random, spread=0.1), paired=False)
        missed += not found.low <= 1 <= found.high
    # Three standard deviations of a count of 12.
    assert 12 - 11 <= missed <= 12 + 11


def test_words_follow_the_whole_interval_and_the_band() -> None:
    random = np.random.default_rng(2)
    slow, fast = rounds(random, shift=0.05), rounds(random)
    assert decide(slow, fast).word == "FASTER"
    assert decide(fast, slow).word == "SLOWER"
    assert decide(slow, fast, band=0.05).word == "UNCLEAR"
    assert decide(slow, fast, band=0.2).word == "SAME"
    quiet = [rounds(random, spread=0.001) for _ in range(2)]
    assert decide(*quiet).word == "SAME"
    assert decide(*quiet, band=0.0).word == "UNCLEAR"


def test_swapped_sides_give_the_inverse_and_units_do_not_matter() -> None:
    random = np.random.default_rng(3)
    for paired in (True, False):
        one, other = rounds(random, spread=0.03, shift=0.1), rounds(random)
        found, swapped = decide(one, other, paired=paired), decide(other, one, paired=paired)
        assert (1 / found.ratio, 1 / found.low) == pytest.approx((swapped.ratio, swapped.high))
        seconds = [[[x / 1e3 for x in row] for row in side] for side in (one, other)]
        scaled = decide(*seconds, paired=paired)
        assert (scaled.low, scaled.high) == pytest.approx((found.low, found.high))


def test_too_few_rounds_are_unclear_and_say_what_is_missing() -> None:
    one = decide([[1.0, 1.1, 1.2]], [[2.0, 2.1, 2.2]])
    assert (one.word, one.ratio) == ("UNCLEAR", pytest.approx(1.1 / 2.1))
    assert one.why.startswith("one round; interleave=5")
    assert math.isnan(one.low)
    assert decide([[1.0]] * 2, [[2.0]] * 2).why.startswith("2 rounds")
    assert decide([[1.0]] * 3, [[2.0]] * 3).word == "SLOWER"
    assert decide([], [[1.0]]).why == "no samples"


def test_unclear_says_about_how_many_rounds_would_tell() -> None:
    random = np.random.default_rng(4)
    enough = []
    for _ in range(60):
        few = rounds(random, shift=0.05, spread=0.02), rounds(random, spread=0.02)
        found = decide(*few)
        if found.word == "UNCLEAR" and "about " in found.why:
            number = int(found.why.partition("about ")[2].split()[0])
            many = [rounds(random, shift=shift, spread=0.02, number=number) for shift in (0.05, 0)]
            enough.append(number < 20 or decide(*many).word == "FASTER")
    assert len(enough) > 20
    assert np.mean(enough) > 0.9


def test_what_all_rounds_share_does_not_hide_a_difference() -> None:
    random = np.random.default_rng(5)
    common = np.linspace(0, 0.3, 14)
    one, other = (
        [list(np.array(row) * math.exp(shared)) for row, shared in zip(side, common, strict=True)]
        for side in (
            rounds(random, shift=0.03, spread=0.002, number=14),
            rounds(random, spread=0.002, number=14),
        )
    )
    assert decide(one, other).word == "FASTER"
    assert decide(one, other, paired=False).word == "UNCLEAR"


def test_the_unit_is_the_process_where_processes_measured_several_rounds() -> None:
    random = np.random.default_rng(6)
    false = {True: 0, False: 0}
    for _ in range(150):
        sides, owners = [], [index // 4 for index in range(16)]
        for _ in range(2):
            levels = 0.05 * random.standard_normal(4)
            sides.append([[10 * math.exp(levels[owner])] * 3 for owner in owners])
            for row in sides[-1]:
                row[0] *= math.exp(0.01 * random.standard_normal())
        for known in (True, False):
            processes = owners if known else []
            found = decide(*sides, baseline_processes=processes, candidate_processes=processes)
            false[known] += found.word in ("FASTER", "SLOWER")
    assert false[True] <= 0.02 * 150
    assert false[False] > 0.1 * 150


def test_between_runs_the_level_of_the_machine_widens_the_interval() -> None:
    random = np.random.default_rng(7)
    quiet = rounds(random, shift=0.05, spread=0.001), rounds(random, spread=0.001)
    level = Level(std_log=0.02, df=8, num_processes=5, num_cases=2)
    assert decide(*quiet, paired=False).word == "FASTER"
    widened = decide(*quiet, paired=False, level=level)
    assert (widened.word, widened.band) == ("UNCLEAR", 0.02)
    assert "2 cases in 5 processes" in widened.why
    half = two_sided_quantile(alpha_of(1), 8.0) * math.sqrt(2) * 0.02
    assert math.log(widened.high / widened.ratio) == pytest.approx(half, rel=0.02)
    # In turns in the same process only the band is that of the level.
    together = decide(*quiet, level=level)
    assert (together.word, together.band) == ("FASTER", 0.02)
    fresh = decide(
        *quiet, level=level, baseline_processes=range(5), candidate_processes=range(5, 10)
    )
    assert fresh.band == 0.01


class TestUntilDecided:
    def test_all_looks_together_spend_the_error_rate(self) -> None:
        spent = sum(alpha_of(look) for look in range(1, len(LOOKS) + 1))
        assert spent == pytest.approx(ERROR_RATE)

    def test_rounds_lead_from_look_to_look(self) -> None:
        number, seen = 5, []
        while added := more_rounds(number, most_rounds=28):
            seen.append(looks_at(number, until_decided=True))
            number += added
        assert (number, seen) == (28, [1, 2, 3, 4, 5])
        assert looks_at(8, until_decided=True) == 3
        assert looks_at(8, until_decided=False) == 1
        assert more_rounds(3) == 2

    def test_equal_cases_are_rarely_told_apart_however_often_it_is_looked(self) -> None:
        random = np.random.default_rng(8)
        false = sum(
            self.measured(random, shift=0.0).word in ("FASTER", "SLOWER") for _ in range(80)
        )
        assert false <= 2
        found = sum(self.measured(random, shift=0.05).word == "FASTER" for _ in range(20))
        assert found >= 16

    @staticmethod
    def measured(random: np.random.Generator, shift: float) -> Verdict:
        one, other, number = [], [], 5
        added = number
        while True:
            one += rounds(random, shift=shift, spread=0.03, number=added)
            other += rounds(random, spread=0.03, number=added)
            found = decide(one, other, looks=looks_at(len(one), until_decided=True))
            added = more_rounds(len(one), most_rounds=40)
            if found.word != "UNCLEAR" or not added:
                return found


def test_rounds_that_go_on_from_one_another_count_for_less() -> None:
    random = np.random.default_rng(9)
    false = {True: 0, False: 0}
    for _ in range(200):
        sides = []
        for _ in range(2):
            series = [0.03 * random.standard_normal()]
            while len(series) < 25:
                noise = 0.03 * math.sqrt(1 - 0.9**2) * random.standard_normal()
                series.append(0.9 * series[-1] + noise)
            sides.append(np.exp(np.reshape(series, (5, 5))))
        for samples_tell in (True, False):
            # Medians alone do not show that the rounds depend on each other.
            shown = [side if samples_tell else np.median(side, axis=1)[:, None] for side in sides]
            found = decide(*(side.tolist() for side in shown))
            false[samples_tell] += found.word in ("FASTER", "SLOWER")
    assert false[True] <= 0.02 * 200
    assert false[False] > 0.05 * 200


def delayed(
    random: np.random.Generator, *, slower: float = 1.0, number: int = 14, passes: int = 50
) -> list[list[float]]:
    """Passes of 1 ms on a CPU that others use too: most wait for some turns of 4 ms."""
    turns = random.geometric(0.3, (number, passes)) - 1
    own = slower * np.exp(0.01 * random.standard_normal((number, passes)))
    return [list(row) for row in own + 4.0 * turns * random.uniform(0.5, 1, (number, 1))]


class TestBusy:
    """Where others delay passes, the fastest of each round may decide."""

    def test_it_finds_what_medians_do_not(self) -> None:
        random = np.random.default_rng(11)
        pairs = [(delayed(random), delayed(random, slower=1.1)) for _ in range(20)]
        assert sum(decide(*pair).word == "SLOWER" for pair in pairs) <= 2
        found = [decide(*pair, busy=True) for pair in pairs]
        assert sum(verdict.word == "SLOWER" for verdict in found) >= 19
        by_fastest = [verdict for verdict in found if verdict.why == BY_FASTEST_PASS]
        assert len(by_fastest) >= 17
        assert all(verdict.ratio == pytest.approx(1 / 1.1, rel=0.01) for verdict in by_fastest)

    def test_equal_cases_are_not_called_different(self) -> None:
        random = np.random.default_rng(12)
        words = [decide(delayed(random), delayed(random), busy=True).word for _ in range(300)]
        assert words.count("FASTER") + words.count("SLOWER") <= 6
        assert "SAME" not in words, "their typical times are not known"

    def test_rounds_that_are_delayed_all_through_do_not_matter(self) -> None:
        """Two threads on one core take turns of 4 ms in each pass of a third of the rounds."""
        random = np.random.default_rng(15)

        def half_delayed(slower: float) -> list[list[float]]:
            found = delayed(random, slower=slower, number=28)
            return [
                [8.0 * time for time in samples] if random.random() < 0.35 else samples
                for samples in found
            ]

        for _ in range(20):
            verdict = decide(half_delayed(1.0), half_delayed(1.1), busy=True)
            assert verdict.word == "SLOWER"
            assert verdict.low <= 1 / 1.1 <= verdict.high < 1 / 1.01
            assert decide(half_delayed(1.0), half_delayed(1.0), busy=True).word == "UNCLEAR"

    def test_more_passes_are_no_advantage(self) -> None:
        """The least of 200 samples is 8% below that of 10, for noise of 5%."""
        random = np.random.default_rng(13)
        for _ in range(20):
            few, many = (
                np.exp(0.05 * random.standard_normal((14, passes))).tolist() for passes in (10, 200)
            )
            assert decide(few, many, busy=True).word in ("UNCLEAR", "SAME")

    def test_what_is_within_the_band_is_not_called_different(self) -> None:
        """Half a percent, which the fastest passes tell from none."""
        random = np.random.default_rng(16)
        for _ in range(20):
            one, other = (delayed(random, slower=slower, number=56) for slower in (1.0, 1.005))
            assert decide(one, other, busy=True).word == "UNCLEAR"

    def test_only_for_rounds_that_took_turns(self) -> None:
        random = np.random.default_rng(14)
        one, other = delayed(random), delayed(random, slower=1.1)
        assert decide(one, other, busy=True, paired=False).word == "UNCLEAR"
