"""Laws: terms that a fit finds again, corrections close to measurements, errors far from them."""

from __future__ import annotations

import numpy as np
import pytest

from harness.forecast.law import Law, Observation, non_negative_fit


def linear(shape: tuple[float, ...]) -> tuple[float, ...]:
    return 1.0, shape[0]


def observed(*pairs: tuple[float, float]) -> list[Observation]:
    return [Observation(shapes=((x,),), ms=ms, source=0) for x, ms in pairs]


def test_a_fit_finds_the_terms_of_exact_times() -> None:
    law = Law(linear, observed(*((x, 2 + 3 * x) for x in (1.0, 2.0, 8.0, 64.0))))
    assert law.coefficients == pytest.approx([2, 3])
    assert law((20.0,)).ms == pytest.approx(62)


def test_no_term_is_negative() -> None:
    rng = np.random.default_rng(0)
    rows = rng.random((30, 4))
    targets = rows @ np.array([1.0, 0.0, 2.0, 0.0]) - 0.4 * rows[:, 3]
    found = non_negative_fit(rows, targets)
    assert found.min() >= 0
    # No change of one coefficient that stays feasible is better.
    gradient = rows.T @ (rows @ found - targets)
    assert gradient[found > 0] == pytest.approx(0, abs=1e-9)
    assert gradient[found == 0].min() >= -1e-9


def test_of_terms_that_no_time_tells_apart_the_first_counts() -> None:
    """Else rounding, which differs between processors, would choose."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        term, other = rng.random((2, 20)) + 0.1
        rows = np.column_stack([term, other, term * rng.random()])
        found = non_negative_fit(rows, 2 * term + other)
        assert found == pytest.approx([2, 1, 0])


def test_a_measured_shape_corrects_its_surroundings_alone() -> None:
    exact = [(float(2**k), float(2**k)) for k in range(10) if k != 5]
    law = Law(linear, observed(*exact, *[(32.0, 40.0)] * 3))
    plain = float(np.dot(linear((32.0,)), law.coefficients))
    assert abs(law((32.0,)).ms - 40) < 0.3 * abs(plain - 40)
    assert law((4096.0,)).ms == pytest.approx(np.dot(linear((4096.0,)), law.coefficients), rel=1e-3)


def test_the_error_grows_with_extrapolation() -> None:
    law = Law(linear, observed(*((x, 2 + 3 * x) for x in (1.0, 2.0, 8.0, 64.0))))
    errors = [law((x,)).error for x in (64.0, 512.0, 65536.0)]
    assert errors == sorted(errors)
    assert errors[-1] > 2 * errors[0]


def test_of_few_shapes_only_the_scale_of_a_usual_law_is_fitted() -> None:
    law = Law(linear, observed((10.0, 24.0)), typical=(2.0, 1.0))
    assert law.coefficients == pytest.approx([4, 2])


def test_an_observation_is_left_out_of_its_own_error_whatever_its_size() -> None:
    noise = (1.0, 1.3, 0.8, 1.2, 0.9)

    def error(unit: float) -> float:
        pairs = [(unit * 4**k, 4**k * one) for k, one in enumerate(noise)]
        return Law(lambda shape: (shape[0],), observed(*pairs)).error

    # 2 ** log2(80) is not 80 in floating point.
    assert error(80.0) == pytest.approx(error(64.0))


def test_ones_at_the_end_of_a_shape_may_be_left_out() -> None:
    items = [Observation(shapes=(shape,), ms=2.0, source=0) for shape in ((4.0,), (8.0, 1.0))]
    law = Law(lambda shape: (1.0,), [*items, Observation(shapes=((4.0, 2.0),), ms=3.0, source=0)])
    assert law((4.0, 1.0)) == law((4.0,))
    assert law((4.0, 4.0)).distance == pytest.approx(1)
