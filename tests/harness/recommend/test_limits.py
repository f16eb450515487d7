"""Largest batches, longest sequences and fewest GPUs, against counting upwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from questions import question

from harness.predictions.capacity import predicted_bytes, why_not
from harness.recommend.bisection import largest
from harness.recommend.limits import limits_of


@pytest.mark.parametrize("most", [1, 2, 7, 8, 100])
@pytest.mark.parametrize("edge", [0, 1, 2, 3, 6, 7, 8, 50, 1000])
def test_bisection_finds_the_edge(edge: int, most: int) -> None:
    assert largest(lambda number: number <= edge, most) == min(edge, most)


def limits(model: str, gpus: int, **typed: Any) -> Any:
    asked = question(model, seq_len=8192, gpus=gpus, sequences=gpus, **typed)
    return asked.machine, limits_of(asked)


def test_one_more_does_not_fit() -> None:
    machine, rows = limits("medium", 2, parallel=["fsdp", "ddp_torch"], checkpoint=["none"])
    assert [row.strategy for row in rows] == ["fsdp", "ddp_torch"]
    for row in rows:
        case = row.batch_case
        assert predicted_bytes(case) <= machine.usable_bytes
        more = replace(case, batch_size=case.batch_size + 1)
        assert predicted_bytes(more) > machine.usable_bytes
        assert "does not fit (needs" in str(why_not(more, machine))
        longer = replace(row.longest_case, seq_len=row.longest + 256)
        assert predicted_bytes(longer) > machine.usable_bytes >= predicted_bytes(row.longest_case)


def test_fewest_gpus_is_the_first_power_of_two_that_holds_the_model() -> None:
    """8 B parameters in float32 take 128 GB with gradients and AdamW's state: over one GPU."""
    _, (row,) = limits("llama3_8b", 8, parallel=["fsdp"], checkpoint=["none"])
    assert row.fewest_gpus == 2
    _, (small,) = limits("small", 8, parallel=["fsdp"], checkpoint=["none"])
    assert small.fewest_gpus == 1
