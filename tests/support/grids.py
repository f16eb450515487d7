"""Grids of parameters: all pairs of values by default, all combinations on demand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

Combination = tuple[Any, ...]


def covering(*axes: Iterable[Any]) -> list[Any]:
    """The product of three axes or more, as parameters of a test.

    A combination that adds no new pair of two axes' values to those before it is marked
    exhaustive: faults mostly need one value or two that meet (pairwise testing, Kuhn, Wallace
    and Gallo 2004, doi:10.1109/TSE.2004.24).
    """
    values = [list(axis) for axis in axes]
    chosen = set(_pairwise([len(axis) for axis in values]))
    parameters = []
    for indices in itertools.product(*(range(len(axis)) for axis in values)):
        combination = [axis[i] for axis, i in zip(values, indices, strict=True)]
        marks = [] if indices in chosen else [pytest.mark.exhaustive]
        parameters.append(pytest.param(*combination, marks=marks))
    return parameters


def _pairs(indices: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """The pairs of values that a combination covers, each (axis, index) twice."""
    return set(itertools.combinations(enumerate(indices), 2))


def _pairwise(sizes: list[int]) -> list[tuple[int, ...]]:
    """Combinations in which all pairs occur, each the one that adds most to those before it."""
    candidates = list(itertools.product(*map(range, sizes)))
    missing = set().union(*map(_pairs, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda indices: len(_pairs(indices) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen
