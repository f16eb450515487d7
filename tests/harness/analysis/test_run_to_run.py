"""Levels of a machine, against the level that was planted."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from records import in_rounds, make_record

from harness.analysis.frame import build_frame
from harness.analysis.row_verdicts import in_turns
from harness.analysis.run_to_run import (
    Kind,
    Repeated,
    assumed_level,
    level_of,
    run_to_run_level,
    run_to_run_levels,
)
from harness.render.table import build_table, finding_of


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


def test_what_varies_within_processes_does_not_hide_all_of_the_level() -> None:
    """Means of processes differ by 1%, less than rounds that differ by 20% explain."""
    rounds = [[10.0 * factor * side] * 3 for factor in (1.0, 1.01, 1.02) for side in (0.9, 1.1)]
    case = Repeated(rounds_ms=rounds, processes=[0, 0, 1, 1, 2, 2], host="a", device="CPU")
    (level,) = run_to_run_levels([case, case, case]).values()
    assert level.std_log == pytest.approx(0.5 * statistics.stdev(map(math.log, (1, 1.01, 1.02))))


def test_one_case_in_three_processes_is_no_calibration() -> None:
    """Else two runs of equal cases were called FASTER or SLOWER in one of twenty."""
    random = np.random.default_rng(6)
    case = repeated(random, level=0.02, spread=0.0, per_process=1, processes=3)
    assert run_to_run_levels([case]) == {}
    assert len(run_to_run_levels([case, case])) == 1


def test_levels_are_of_one_machine_and_of_cases_of_one_kind() -> None:
    random = np.random.default_rng(4)
    long = repeated(random, level=0.01, spread=0.0, per_process=1)
    short = repeated(random, level=0.1, spread=0.0, per_process=1, median_ms=0.2)
    few = repeated(random, level=0.1, spread=0.0, per_process=4, processes=2)
    levels = run_to_run_levels([long, short, few])
    kinds = [Kind("a", "CPU", short, False) for short in (False, True)]
    assert set(levels) == set(kinds)
    assert levels[kinds[1]].std_log > 2 * levels[kinds[0]].std_log
    assert levels[kinds[0]].num_cases == 1


def test_the_level_of_kernels_is_that_of_kernels() -> None:
    """Of two cases of one length, one waited for its host in some rounds."""
    random = np.random.default_rng(5)
    kernel = repeated(random, level=0.002, spread=0.0, per_process=1)
    waited = replace(repeated(random, level=0.1, spread=0.0, per_process=1), hindered=True)
    levels = run_to_run_levels([kernel, waited])
    of_kernels, of_hosts = (Kind("a", "CPU", False, hindered) for hindered in (False, True))
    assert levels[of_kernels].std_log < 0.005
    assert levels[of_hosts].std_log > 0.05
    assert level_of(levels, of_kernels, told=True) == levels[of_kernels]
    # A record from before it was told may be either.
    assert level_of(levels, of_kernels, told=False) == levels[of_hosts]
    assert level_of({}, of_kernels, told=False) is None


@pytest.mark.parametrize(
    ("median_ms", "hindered", "device", "percent"),
    [
        (0.2, False, "cuda", "5%"),
        (30.0, True, "cuda", "25%"),
        (0.2, None, "cuda", "25%"),
        (30.0, None, "cuda", "5%"),
        (0.2, False, "cpu", "25%"),
        (30.0, False, "cpu", "5%"),
    ],
)
def test_what_is_assumed_without_a_calibration(
    median_ms: float, hindered: bool | None, device: str, percent: str
) -> None:
    assert assumed_level(median_ms, hindered, device).percent == percent


def test_a_case_that_waited_in_few_rounds_is_none_of_kernels() -> None:
    """The H200's own calibration: 2,048 tokens waited for the host in three of eight rounds."""
    device_ms, host_ms = 0.40, [0.44, 0.23, 0.24, 0.23, 0.22, 0.25, 0.34, 0.42]
    times = [0.58, 0.40, 0.40, 0.40, 0.40, 0.40, 0.53, 0.56]
    record = make_record(device="cuda", samples_ms={"step": [times]})
    record.phases["step"].host_ms, record.phases["step"].device_ms = [host_ms], [[device_ms] * 3]
    record.rounds = [1] * 8
    (row,) = build_frame([record]).to_dict("records")
    assert (row["host_bound"], row["hindered"]) == (False, True)
    record.rounds = [8]
    (row,) = build_frame([record]).to_dict("records")
    assert (row["host_bound"], row["hindered"]) == (False, False)


def test_the_table_shows_each_case_and_the_level_of_all() -> None:
    records = []
    for seq_len in (512, 1024):
        record = in_rounds(make_record(seq_len=seq_len, samples_ms={"step": [[10.0] * 4]}))
        times = [10.0, 10.0, 10.1, 10.1, 10.1]
        record.phases["step"].samples_ms = [[time for time in times for _ in range(4)]]
        records.append(record)
    frame = build_frame(records)
    table = build_table("run_to_run", frame)
    assert table is not None
    level = statistics.stdev(map(math.log, times))
    assert list(table.rows["level"]) == pytest.approx([level, level])
    assert "0.55% from 1 ms (2 cases in 5 processes)" in table.caption
    assert "0.55% in the worst, which takes 10.1 ms" in finding_of(table)
    assert frame["run_level"].iloc[0].std_log == pytest.approx(level)
    assert build_table("run_to_run", build_frame([make_record()])) is None


def test_a_case_that_alone_gives_no_level_is_said_to() -> None:
    record = in_rounds(make_record(samples_ms={"step": [[10.0, 10.1, 10.2]]}), 3)
    table = build_table("run_to_run", build_frame([record]))
    assert table is not None
    assert "in some round: none, as one case in three processes" in table.caption


class TestInTurns:
    def moments(self, *seconds: float) -> list[str]:
        return [f"2026-01-02T03:04:{second:06.3f}+00:00" for second in seconds]

    def test_rounds_that_alternate(self) -> None:
        assert in_turns(self.moments(0, 10, 20), self.moments(5, 15, 25))
        # In random order within each round, and one that was decided earlier.
        assert in_turns(self.moments(0, 15, 20), self.moments(5, 10, 25))
        assert in_turns(self.moments(0, 10, 20), self.moments(5, 15))

    def test_one_after_the_other(self) -> None:
        assert not in_turns(self.moments(0, 10, 20), self.moments(30, 40, 50))
        assert not in_turns(self.moments(0, 1, 2), self.moments(3, 4, 5))
        assert not in_turns([], self.moments(1))
