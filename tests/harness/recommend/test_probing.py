"""Limits that are tried out: the edge that trials find, and what a trial is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from questions import question

from harness.cases.case import Case
from harness.commands import fits
from harness.recommend.bisection import TOLERANCE, edge_near
from harness.recommend.limits import limits_of
from harness.recommend.measuring import Bench
from harness.recommend.probing import tried, until
from harness.request.grid import Parts, expand
from harness.store.record import RecordStore
from harness.terminal import PrintableConsole


@pytest.mark.parametrize("edge", [0, 1, 2, 5, 90, 100, 117, 300, 1000])
def test_the_edge_is_found_in_few_trials_near_the_guess(edge: int) -> None:
    asked = list[int]()

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= edge

    found = edge_near(holds, 100, 1000)
    assert found.is_sure
    assert found.number <= edge <= found.number * (1 + TOLERANCE) + (edge < 50)
    assert len(set(asked)) == len(asked), "no trial is made twice"
    if edge in (90, 100, 117):
        assert len(asked) <= 6


def test_what_was_found_in_time_is_a_lower_bound() -> None:
    deadline = until(time.monotonic() - 1, lambda case: True)
    with pytest.raises(TimeoutError):
        deadline(None)  # type: ignore[arg-type]
    asked = list[int]()

    def holds(number: int) -> bool:
        asked.append(number)
        if len(asked) > 2:
            raise TimeoutError
        return True

    found = edge_near(holds, 100, 10_000)
    assert (found.number, found.is_sure) == (110, False)


def test_a_row_is_tried_along_batch_and_length() -> None:
    asked = question(
        "medium", seq_len=8192, gpus=2, sequences=2, parallel=["fsdp"], checkpoint=["none"]
    )
    (row,) = limits_of(asked)
    tokens = row.longest_case.seq_len if row.longest_case else 0

    def holds(case: Case) -> bool:
        # A device that holds a tenth less than predicted.
        if case.seq_len == 8192:
            return case.batch_size * case.parallel.dp <= 0.9 * row.batch
        return case.seq_len <= 0.9 * tokens

    found = tried(row, holds)
    assert found.batch is not None
    assert found.longest is not None
    # Both ranks get one sequence more or less.
    assert 0.88 * row.batch - 2 < found.batch.number <= 0.9 * row.batch
    assert 0.87 * tokens < found.longest.number <= 0.9 * tokens


def test_a_trial_is_one_step_with_a_record(tmp_path: Path) -> None:
    arguments = {"model": ["tiny"], "model.num_layers": [1], "seq_len": [32]}
    arguments |= {"batch_size": [1], "task": ["train_step"]}
    (case,) = expand([{}], arguments, "cpu").values()
    bench = Bench(
        results=tmp_path,
        launcher=Parts().choice("launcher", {}),
        budget_s=1,
        timeout_s=60,
        console=PrintableConsole(),
        command="attnbench fits",
        label="fits-test",
    )
    assert bench.fits(case)
    (record,) = RecordStore(tmp_path).load()[0].values()
    assert record.case["task"]["measure_steps"] == 1


def test_a_cpu_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"measure=true: .* on GPUs alone"):
        fits.main(["model=tiny", "device=cpu", "measure=true"])
