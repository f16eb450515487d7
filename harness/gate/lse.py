"""The log-sum-exp that a kernel gives: under it the probabilities of a row sum to one.

A sum of exp(s - lse) over a row's scores is exp(exact lse - given lse), so the error of the lse is
that of the sum less one. Kernels compute it in float32 whatever the inputs' dtype; those that round
their scores to it, and exponentials that are only as exact as it, are off by its roundoff.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.gate.comparison import Place, largest
from harness.gate.exact import Rows
from harness.gate.findings import Finding, number
from harness.gate.tolerances import Format


def check_lse(
    given: Tensor,
    right: Rows,
    careful: tuple[Rows, Rows],
    number_format: Format,
    rows: Tensor,
    place: Place,
) -> Iterator[Finding]:
    """Sampled rows [..., R] of a given log-sum-exp, one by one and in the mean of a head.

    Args:
        rows: their indices.
    """
    expected = right.values["lse"]
    exactly, carefully = (rows.values["lse"] for rows in careful)
    sums = (expected - given.double()).exp() - 1
    # A row that sees no key has a log-sum-exp of minus infinity, and no sum.
    blind = expected == -torch.inf
    sums = sums.masked_fill(blind & (given == -torch.inf), 0.0)
    reached = (carefully.double() - exactly).masked_fill(exactly == -torch.inf, 0.0).abs().max()
    scores = 1 + expected.masked_fill(blind, 0.0).abs()
    row_tolerance = number_format.factor * number(float(reached)) + (
        2 * number_format.roundoff * float(scores.max())
    )
    error, where = largest(sums.abs(), place, rows)
    yield Finding(
        name="lse row",
        error=error,
        tolerance=row_tolerance,
        said=f"probabilities under the lse sum to 1 only within {error:.2g} in {where}",
    )
    error, where = largest(sums.mean(-1).abs(), place)
    yield Finding(
        name="lse",
        error=error,
        tolerance=row_tolerance * max(1 / 3, min(1.0, 2 * sums.shape[-1] ** -0.5)),
        said=f"probabilities under the lse sum to 1 only within {error:.2g} in {where}",
    )
