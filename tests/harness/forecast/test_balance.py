"""Work of the busiest rank where ranks are too many to count each block."""

from __future__ import annotations

import pytest

from harness.forecast import balance
from parallel.context.blocks.layouts import LAYOUTS


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_many_ranks_are_as_unbalanced_as_fewer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS[name](num_ranks=2 * balance.MOST_RANKS)
    fewer = balance._of_layout(layout, gathers=False)
    monkeypatch.setattr(balance, "MOST_RANKS", layout.num_ranks)
    balance._of_layout.cache_clear()
    exact = balance._of_layout(layout, gathers=False)
    balance._of_layout.cache_clear()
    assert fewer == pytest.approx(exact, rel=0.01)
    if name == "contiguous":
        # Of P parts the last step but the first has a whole block on the busiest rank.
        assert exact == pytest.approx(2 - 1 / layout.num_ranks, rel=1e-3)
