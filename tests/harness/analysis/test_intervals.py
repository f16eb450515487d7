"""The interval of a median by the sign test, and the fastest passes of rounds."""

from __future__ import annotations

import numpy as np
import pytest
from records import make_record

from harness.analysis.frame import build_frame
from harness.analysis.intervals import Side, fastest_passes, interval_of_median, most_beyond
from harness.render.table import build_table


@pytest.mark.parametrize(
    ("number", "alpha", "beyond"),
    # 2 * (1 + 14) / 2**14 = 0.18%; 5% is not reached by 5 coins, of which 2 / 32 agree.
    [(14, 0.002, 1), (14, 0.0018, 0), (28, 0.004, 6), (56, 0.004, 16), (5, 0.05, None)],
)
def test_coins_that_may_differ(number: int, alpha: float, beyond: int | None) -> None:
    assert most_beyond(number, alpha) == beyond


def test_the_interval_reaches_from_value_to_value() -> None:
    values = np.arange(14.0)
    assert interval_of_median(values, 0.002) == (1.0, 12.0)
    assert interval_of_median(values[:5], 0.05) is None


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    missed = 0
    for _ in range(2000):
        interval = interval_of_median(random.standard_cauchy(20), 0.05)
        assert interval is not None
        missed += not interval[0] <= 0 <= interval[1]
    assert 0.02 * 2000 < missed <= 0.05 * 2000


def test_rounds_that_were_delayed_as_a_whole_are_left_out_on_either_side() -> None:
    sides = [
        Side.of([[1.0, 2.0], [8.0, 9.0], [1.0], [1.0, 0.1]], ()),
        Side.of([[1.1, 2.0], [1.1, 1.2], [9.0], [1.1]], ()),
    ]
    assert np.exp(fastest_passes(sides)) == pytest.approx([1 / 1.1, 1 / 1.1])


def test_a_difference_of_any_size_is_kept() -> None:
    sides = [Side.of([[5.0]] * 10 + [[0.01]], ()), Side.of([[1.0]] * 11, ())]
    assert np.exp(fastest_passes(sides)) == pytest.approx([5.0] * 10)


def test_a_clock_that_shows_no_time() -> None:
    """Every table of a sweep was lost to one such record."""
    side = Side.of([[0.0, 0.0, 0.0]] * 3, [1, 2, 3])
    assert np.isfinite(side.values).all()
    assert all(np.isfinite(logs).all() for logs in side.logs)
    zero = make_record(samples_ms={"step": [[0.0] * 5], "forward": [[0.0] * 5]})
    table = build_table("summary", build_frame([zero, make_record(attention="sdpa")]))
    assert table is not None
    assert len(table.rows) == 2
