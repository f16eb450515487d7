"""What a recommendation's page says of a predicted time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.recommend import page
from harness.recommend.combination import Combination


def combination(*ms: float) -> Combination:
    parts = [SimpleNamespace(name=f"part {place}", ms=one) for place, one in enumerate(ms)]
    item: Any = SimpleNamespace(step=SimpleNamespace(parts=parts))
    return cast(Combination, item)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        ((2.0, 0.0, 5.0), "7.00 ms: part 2 5.00 ms, part 0 2.00 ms"),
        (
            (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
            "36.0 ms: part 7 8.00 ms, part 6 7.00 ms, part 5 6.00 ms, part 4 5.00 ms, "
            "part 3 4.00 ms, part 2 3.00 ms, the rest 3.00 ms",
        ),
    ],
)
def test_parts_add_up_to_the_time(ms: tuple[float, ...], text: str) -> None:
    assert page.parts(combination(*ms)) == text


def test_without_a_prediction_there_are_none() -> None:
    assert page.parts(None) == ""
