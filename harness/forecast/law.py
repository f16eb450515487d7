"""Laws: times as sums of physical terms, fitted to measurements and corrected close to them.

A law says t = sum over terms of coefficient x feature, with no negative coefficient: so many
microseconds a launch, so many a byte, a FLOP, a wave of tiles. Coefficients minimise relative
errors. What the law leaves unexplained at measured shapes corrects it at shapes close by, less
and less with distance (Nadaraya-Watson, in log space), and the rest is its error. Shapes are as
long as each other but for ones at the end, which may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Shape = tuple[float, ...]
Features = Callable[[Shape], Sequence[float]]

REACH = 0.6
"""Distance in doublings over which a measured shape's residual fades to 1/sqrt(e)."""

TIED_GRADIENTS = 1e-9
"""Part by which gradients differ at most that rounding alone tells apart."""

PRIOR = 0.15
"""Weight of the law itself beside the measured shapes around."""

LEAST_ERROR = 0.015
"""Log error below which no law is trusted: devices of one kind differ by as much."""

ERROR_A_DOUBLING = 0.08
"""Log error that each doubling beyond the closest measured shape adds, in quadrature: what laws of
the H200's smallest third of shapes are off by at the others (benchmarks/bench_extrapolation.py)."""

UNTESTED_ERROR = 0.15
"""Log error of a law with too few measurements to test it on any."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Observation:
    """One measured time of one or several operations that follow each other."""

    shapes: tuple[Shape, ...]
    ms: float
    source: int
    """Index of its record in the calibration's list."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimate:
    """A time, and its standard error as a fraction."""

    ms: float
    error: float
    distance: float
    """Doublings from the closest measured shape."""


class Law:
    """A fitted law; see the module.

    Args:
        features: gives the terms of a shape.
        observations: at least one.
        typical: coefficients of a law of the same terms. Of fewer distinct shapes than terms,
            only their scale is fitted.
    """

    def __init__(
        self,
        features: Features,
        observations: Sequence[Observation],
        typical: Sequence[float] | None = None,
    ) -> None:
        self._features = features
        rows = np.array([_summed(features, item.shapes) for item in observations])
        times = np.array([item.ms for item in observations])
        distinct = len({item.shapes for item in observations})
        if typical is not None and distinct < rows.shape[1] + 1:
            scale = math.exp(float(np.mean(np.log(times / (rows @ np.array(typical))))))
            self.coefficients = scale * np.array(typical)
        else:
            self.coefficients = non_negative_fit(rows / times[:, None], np.ones(len(times)))
        residuals = np.log(times / np.maximum(rows @ self.coefficients, 1e-12))
        spread = [
            (shape, residual)
            for item, residual in zip(observations, residuals, strict=True)
            for shape in item.shapes
        ]
        self._shapes = [shape for shape, _ in spread]
        width = max(map(len, self._shapes))
        self._places = np.array([_place(shape, width) for shape in self._shapes])
        self._residuals = np.array([residual for _, residual in spread])
        self.error = self._left_out_error(observations, residuals)
        self._known: dict[Shape, Estimate] = {}

    def __call__(self, shape: Shape) -> Estimate:
        """The time of one operation."""
        if shape not in self._known:
            self._known[shape] = self._estimate(shape)
        return self._known[shape]

    def _estimate(self, shape: Shape) -> Estimate:
        law = float(np.dot(self._features(shape), self.coefficients))
        distances = self._distances(shape)
        nearest = float(distances.min())
        correction = _weighted(self._residuals, distances)
        # The law's own error where it is alone, less close to a measured shape.
        error = math.hypot(
            max(LEAST_ERROR, self.error * min(1.0, 0.3 + nearest / REACH)),
            ERROR_A_DOUBLING * max(0.0, nearest - 1),
        )
        return Estimate(ms=law * math.exp(correction), error=error, distance=nearest)

    def _distances(self, shape: Shape) -> NDArray[np.float64]:
        width = max(self._places.shape[1], len(shape))
        # Where no measured shape has a place, it is one.
        places = np.pad(self._places, ((0, 0), (0, width - self._places.shape[1])))
        found: NDArray[np.float64] = np.sqrt(((places - _place(shape, width)) ** 2).sum(axis=1))
        return found

    def _left_out_error(
        self, observations: Sequence[Observation], residuals: NDArray[np.float64]
    ) -> float:
        """Root mean square log error of each observation, corrected by the others alone."""
        if len(observations) < 3:
            return UNTESTED_ERROR
        errors = []
        for index, item in enumerate(observations):
            others = np.array([shape not in item.shapes for shape in self._shapes])
            place = self._distances(item.shapes[0])
            kept = self._residuals[others]
            correction = _weighted(kept, place[others]) if len(kept) else 0.0
            errors.append(residuals[index] - correction)
        return float(np.sqrt(np.mean(np.square(errors))))


def _place(shape: Shape, width: int) -> NDArray[np.float64]:
    """Logarithms of a shape, whose ones at the end may be left out."""
    return np.log2(np.array([*shape, *[1.0] * (width - len(shape))]))


def _summed(features: Features, shapes: Sequence[Shape]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = np.sum([features(shape) for shape in shapes], axis=0)
    return total


def _weighted(residuals: NDArray[np.float64], distances: NDArray[np.float64]) -> float:
    weights = np.exp(-0.5 * (distances / REACH) ** 2)
    return float((weights * residuals).sum() / (PRIOR + weights.sum()))


def non_negative_fit(
    rows: NDArray[np.float64], targets: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares with coefficients of at least 0 (Lawson and Hanson's active set)."""
    num_terms = rows.shape[1]
    found = np.zeros(num_terms)
    active = np.zeros(num_terms, dtype=bool)
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    scaled = rows / scale
    for _ in range(3 * num_terms):
        gradient = scaled.T @ (targets - scaled @ found)
        gradient[active] = -np.inf
        if active.all() or gradient.max() <= 1e-9:
            break
        # Terms that observations cannot tell apart have equal gradients but for rounding, which
        # depends on the processor: of those the first.
        best = int(np.argmax(gradient >= (1 - TIED_GRADIENTS) * gradient.max()))
        active[best] = True
        found = _shrunk_to_feasible(scaled, targets, found, active)
    result: NDArray[np.float64] = found / scale
    return result


def _shrunk_to_feasible(
    rows: NDArray[np.float64],
    targets: NDArray[np.float64],
    found: NDArray[np.float64],
    active: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """The fit over active terms, dropping those that would become negative (edits ``active``)."""
    while True:
        trial = np.zeros_like(found)
        trial[active] = np.linalg.lstsq(rows[:, active], targets, rcond=None)[0]
        if not active.any() or trial[active].min() >= 0:
            return trial
        negative = active & (trial <= 0)
        steps = found[negative] / np.maximum(found[negative] - trial[negative], 1e-300)
        found = found + steps.min() * (trial - found)
        active &= found > 1e-12
        found = np.where(active, found, 0.0)
