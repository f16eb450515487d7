"""Ratios of rates whose two sides were measured unlike each other: what counts, and the marks."""

from __future__ import annotations

from typing import Any

import pytest
from records import ENVIRONMENT, make_record, make_split_record

from harness.analysis.disturbance import sm_clock_mhz
from harness.analysis.frame import build_frame
from harness.analysis.likeness import differences
from harness.analysis.machines import Machine
from harness.cases import format as fmt
from harness.render.table import Table, build_table, finding_of
from harness.store.record import Record, Round


def state(*clocks: float, idle: bool = False) -> list[dict[str, Any]]:
    """The states of ranks whose SM clocks are these, before and after."""
    reasons = ["gpu_idle"] if idle else []
    moment = [{"sm_clock_mhz": clock, "throttle_reasons": reasons} for clock in clocks]
    return [{"before": found, "after": found} for found in moment]


def step(*clocks: float, ms: float = 100.0, **fields: Any) -> Record:
    """A training step on as many ranks as there are clocks."""
    ranks = len(clocks)
    samples = {"step": [[ms] * 3] * ranks}
    return make_record(dp=ranks, samples_ms=samples, device_state=state(*clocks), **fields)


def scaling(*records: Record) -> Table:
    table = build_table("strategy_scaling", build_frame(records))
    assert table is not None
    return table


def marks(table: Table) -> list[str]:
    """The marks of efficiency by row, of one rank first."""
    rows = table.rows.sort_values("world_size")
    return [str(mark) for mark in rows["efficiency_mark"]]


class TestClock:
    def test_of_the_slowest_rank(self) -> None:
        assert sm_clock_mhz(step(1800.0, 1600.0)) == 1600.0

    def test_an_idle_device_tells_nothing(self) -> None:
        assert sm_clock_mhz(make_record(device_state=state(300.0, idle=True))) != sm_clock_mhz(
            step(1800.0)
        )
        assert sm_clock_mhz(make_record()) != sm_clock_mhz(make_record())  # NaN

    def test_median_over_rounds(self) -> None:
        record = make_record(device_state=state(1980.0))
        record.round_states = [
            Round(started_at="2026-01-02T03:04:05+00:00", process=0, ranks=state(clock))
            for clock in (1500.0, 1520.0, 1540.0)
        ]
        assert sm_clock_mhz(record) == 1530.0


ROW: dict[str, Any] = {
    "device": "cuda",
    "sm_clock_mhz": 1800.0,
    "machine": Machine(name="a"),
    "revision": "0123abc",
    "rounds_started_at": ["2026-01-02T03:04:05+00:00"],
}


class TestDifferences:
    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ({}, []),
            ({"sm_clock_mhz": 1765.0}, []),
            ({"sm_clock_mhz": 1763.0}, ["clocks"]),
            ({"sm_clock_mhz": 1838.0}, ["clocks"]),
            ({"sm_clock_mhz": float("nan")}, ["clocks"]),
            ({"machine": Machine(name="b")}, ["host"]),
            ({"machine": Machine()}, []),
            ({"revision": "fedcba9"}, ["revision"]),
            ({"rounds_started_at": ["2026-01-02T03:13:05+00:00"]}, []),
            ({"rounds_started_at": ["2026-01-02T03:15:05+00:00"]}, ["run"]),
            (
                {"sm_clock_mhz": 1.0, "machine": Machine(name="b"), "revision": "x"},
                ["clocks", "host", "revision"],
            ),
        ],
    )
    def test_each(self, changed: dict[str, Any], expected: list[str]) -> None:
        assert differences(ROW, ROW | changed) == expected

    def test_a_cpu_has_no_clocks(self) -> None:
        row = ROW | {"device": "cpu", "sm_clock_mhz": float("nan")}
        assert differences(row, row) == []


class TestScaling:
    """Weak scaling, as in results once committed: 226.45 ms at 1,448 and 225.99 at 1,628 MHz."""

    def test_other_clocks_are_marked_and_not_claimed(self) -> None:
        table = scaling(step(1628.0, ms=225.99), step(1448.0, 1448.0, ms=226.45))
        assert marks(table) == ["", fmt.STAR]
        assert "SM clocks" in " ".join(table.footnotes)
        said = finding_of(table)
        assert "99" not in said
        assert "100" not in said
        assert "efficiency is not claimed, as it was measured at other clocks" in said.lower()

    def test_equal_clocks_are_claimed(self) -> None:
        table = scaling(step(1620.0, ms=225.99), step(1628.0, 1628.0, ms=251.1))
        assert marks(table) == ["", ""]
        assert finding_of(table).startswith("Efficiency on 2 ranks is 90%")
        assert not table.footnotes

    def test_another_revision_is_marked(self) -> None:
        later = ENVIRONMENT | {"git_revision": "fedcba9"}
        table = scaling(step(1600.0), step(1600.0, 1600.0, environment=later))
        assert marks(table) == ["", fmt.STAR]
        assert "by another revision" in finding_of(table)


class TestSplitSequences:
    def test_efficiency_and_speedup(self) -> None:
        """A ring at the clocks of the one device, and a zigzag at lower ones."""
        times = {"forward": [[2.0]], "backward": [[4.0]], "forward_backward": [[6.0]]}
        alone = make_record(
            task="attention",
            mode="forward_backward",
            samples_ms=times,
            device_state=state(1500.0),
        )
        ring = make_split_record("ring", ms=4.0, device_state=state(1500.0, 1490.0))
        zigzag = make_split_record("zigzag", ms=3.0, device_state=state(1500.0, 1300.0))
        table = build_table("context_parallel", build_frame([alone, ring, zigzag]))
        assert table is not None
        cells = {
            row[0]: (row[index["speed-up"]], row[index["efficiency (%)"]])
            for index in [{column.header: i for i, column in enumerate(table.columns)}]
            for row in table.cells()
        }
        assert cells == {
            "ring": (f"1.50{fmt.TIMES}", "75.0"),
            "zigzag": (f"2.00{fmt.TIMES}⋆", "100.0⋆"),
        }
        assert "efficiency is not claimed of 1 of 2, measured at other clocks" in finding_of(table)
