"""Levels of a machine, against the level that was planted."""

from __future__ import annotations

import numpy as np
import pytest

from harness.analysis.run_to_run import Repeated, run_to_run_level, run_to_run_levels


def repeated(
    random: np.random.Generator,
    *,
    level: float,
    spread: float,
    per_process: int,
    processes: int = 6,
    median_ms: float = 10.0,
) -> Repeated:
    owners = [process for process in range(processes) for _ in range(per_process)]
    levels = level * random.standard_normal(processes)
    values = [levels[owner] + spread * random.standard_normal() for owner in owners]
    return Repeated(
        rounds_ms=[[median_ms * float(np.exp(value))] * 3 for value in values],
        processes=owners,
        host="a",
        device="CPU",
    )


@pytest.mark.parametrize("per_process", [2, 5])
def test_what_varies_within_a_process_is_no_part_of_the_level(per_process: int) -> None:
    random = np.random.default_rng(1)
    cases = [repeated(random, level=0.02, spread=0.02, per_process=per_process) for _ in range(100)]
    assert run_to_run_level(cases).std_log == pytest.approx(0.02, rel=0.15)
    quiet = [repeated(random, level=0.0, spread=0.02, per_process=5) for _ in range(100)]
    assert run_to_run_level(quiet).std_log < 0.008


def test_with_one_round_per_process_everything_counts() -> None:
    random = np.random.default_rng(2)
    cases = [repeated(random, level=0.03, spread=0.04, per_process=1) for _ in range(100)]
    assert run_to_run_level(cases).std_log == pytest.approx(0.05, rel=0.15)


def test_cases_that_a_process_slows_together_count_as_one() -> None:
    random = np.random.default_rng(3)
    apart = [repeated(random, level=0.01, spread=0.0, per_process=2) for _ in range(50)]
    together = [
        Repeated(
            rounds_ms=[[factor * time for time in row] for row in apart[0].rounds_ms],
            processes=apart[0].processes,
        )
        for factor in range(1, 51)
    ]
    found = run_to_run_level(together)
    assert (found.df, found.num_processes, found.num_cases) == (pytest.approx(5), 6, 50)
    assert run_to_run_level(apart).df > 50
    assert "50 cases in 6 processes" in found.words


def test_levels_are_of_one_machine_and_of_cases_of_one_kind() -> None:
    random = np.random.default_rng(4)
    long = repeated(random, level=0.01, spread=0.0, per_process=1)
    short = repeated(random, level=0.1, spread=0.0, per_process=1, median_ms=0.2)
    few = repeated(random, level=0.1, spread=0.0, per_process=4, processes=2)
    levels = run_to_run_levels([long, short, few])
    assert set(levels) == {("a", "CPU", False), ("a", "CPU", True)}
    assert levels["a", "CPU", True].std_log > 2 * levels["a", "CPU", False].std_log
    assert levels["a", "CPU", False].num_cases == 1
