"""Sampled rows of a result against the same rows in float64: by head, by row, and as a factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.gate.findings import Finding, number
from harness.gate.tolerances import Format

Place = Callable[[tuple[int, ...]], str]
"""Says in words where an index [b, g] or [b, g, h] lies."""

SHARE_OF_FACTOR = 1 / 2
"""Of the relative error's tolerance, what a factor on a whole head may be off. Errors within a row
are alike, a score's above all, so that few rows cancel less."""

ROW = 2.0
"""A single row may be so many times as wrong as a head of them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Errors:
    """Errors of sampled rows against float64, relative to the rows' norms."""

    by_head: Tensor
    """||got - exact|| / ||exact||, [...] by head."""
    by_row: Tensor
    """The same by row, [..., R]; a row that is smaller than most counts as one of their size."""
    factor: Tensor
    """<got, exact> / <exact, exact> - 1, by head: what a wrong scale would multiply by."""

    @property
    def worst_head(self) -> float:
        return number(float(self.by_head.max()))

    @property
    def worst_row(self) -> float:
        return number(float(self.by_row.max()))


def errors_of(got: Tensor, exact: Tensor, terms: Tensor) -> Errors:
    """Errors of rows [..., R, D].

    Args:
        terms: norms [..., R] of the terms of each row. Where they cancel, dividing by the norm
            of what is left would compare noise with noise.
    """
    difference = got.double() - exact
    off = difference.norm(dim=-1)
    size = torch.maximum(exact.norm(dim=-1), 2 * terms.double())
    in_head = size.norm(dim=-1)
    usual = in_head[..., None] * size.shape[-1] ** -0.5
    tiny = torch.finfo(torch.float64).tiny
    return Errors(
        by_head=off.norm(dim=-1) / in_head.clamp(min=tiny),
        by_row=off / torch.maximum(size, usual).clamp(min=tiny),
        factor=(difference * exact).sum((-1, -2)) / in_head.square().clamp(min=tiny),
    )


def compare(
    name: str,
    got: Errors,
    reached: Errors,
    number_format: Format,
    *,
    rows: Tensor,
    place: Place,
    num_terms: int = 1,
) -> Iterator[Finding]:
    """The errors of a kernel's rows beside those of a careful computation.

    Args:
        rows: their indices in the tensor, [..., R].
        num_terms: of the sum that each element is, if a kernel may add as many one by one.
    """
    factor, least = number_format.factor, number_format.least_of_sum(num_terms)
    tolerance = factor * max(reached.worst_head, least)
    error, where = largest(got.by_head, place)
    yield Finding(
        name=name,
        error=error,
        tolerance=tolerance,
        said=f"relative error of {name} against float64 is {error:.2g} in {where}",
    )
    error, where = largest(got.by_row, place, rows)
    yield Finding(
        name=f"{name} row",
        error=error,
        tolerance=ROW * factor * max(reached.worst_row, least),
        said=f"relative error of {name} against float64 is {error:.2g} in {where}",
    )
    error, where = largest(got.factor.abs(), place)
    yield Finding(
        name=f"{name} factor",
        error=error,
        tolerance=tolerance * max(SHARE_OF_FACTOR, min(1.0, 3 * rows.shape[-1] ** -0.5)),
        said=f"{name} is too large or too small by a factor of {error:.2g} in {where}",
    )


def largest(errors: Tensor, place: Place, rows: Tensor | None = None) -> tuple[float, str]:
    """The largest error, or one that is no number, and where it is in words.

    Args:
        errors: by head; by row if ``rows`` names the rows.
    """
    comparable = errors.nan_to_num(nan=torch.inf)
    flat = int(comparable.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), errors.shape))
    where = place(index) if rows is None else f"{place(index[:-1])}, row {int(rows[index])}"
    return number(float(comparable.flatten()[flat])), where
