"""Which tests run: what runs by default covers every pair of values, and ``-m gpu`` misses none."""

from __future__ import annotations

import itertools

import pytest
from grids import covering


def test_every_pair_runs_by_default_and_few_combinations_do() -> None:
    axes = (["a", "b", "c", "d"], [1, 2, 3], [True, False], [None, 0])
    parameters = covering(*axes)
    assert [item.values for item in parameters] == list(itertools.product(*axes))
    default = [item.values for item in parameters if not item.marks]
    assert len(default) <= 14
    for first, second in itertools.combinations(range(len(axes)), 2):
        met = {(values[first], values[second]) for values in default}
        assert met == set(itertools.product(axes[first], axes[second]))


@pytest.mark.parametrize("marker", ["gpu", "multigpu"])
def test_files_name_the_markers_of_their_tests(marker: str, request: pytest.FixtureRequest) -> None:
    """With ``-m gpu`` no others are read; see conftest."""
    marked = [item for item in request.session.items if item.get_closest_marker(marker)]
    assert {item.path for item in marked if f"mark.{marker}" not in item.path.read_text()} == set()
