"""Ratios say when what they compare was measured at different times."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from records import make_record, make_strategy_record

from harness.analysis.frame import build_frame
from harness.cases import format as fmt
from harness.render.table import APART, build_table
from harness.store.record import Record

SAMPLES = {"forward_backward": [[1.0, 1.1, 1.2]]}


def started(record: Record, time: str) -> Record:
    return replace(record, started_at=f"2026-01-02T{time}+00:00" if time else "")


@pytest.mark.parametrize(
    ("times", "marked"),
    [
        (("03:00:00", "03:09:59"), False),
        (("03:00:00", "03:10:01"), True),
        (("03:10:01", "03:00:00"), True),
        (("", "03:10:01"), False),
    ],
)
def test_pairs_measured_long_after_each_other_are_marked(
    times: tuple[str, str], marked: bool
) -> None:
    pairs = zip(("naive", "sdpa"), times, strict=True)
    records = [
        started(make_record(attention=name, task="attention", samples_ms=SAMPLES), time)
        for name, time in pairs
    ]
    built = build_table("comparison", build_frame(records))
    assert built is not None
    assert (APART in built.footnotes) == marked
    headers = [column.header for column in built.columns]
    ratios = [row[headers.index("ratio")] for row in built.cells()]
    assert {ratio.endswith(fmt.PILCROW) for ratio in ratios} == {marked}


HOURS = ("03:00:00", "04:00:00", "05:00:00")


@pytest.mark.parametrize(
    ("naive", "sdpa", "marked"),
    [
        # In turns, stopped for an hour twice.
        (HOURS, HOURS, False),
        # The second round of one before the stop, of the other after it.
        (HOURS, ("03:00:00", "03:00:30", "05:00:00"), True),
        # Whole before the other was resumed, and by a version that kept no rounds.
        (HOURS, ("03:00:00", "03:00:10", "03:00:20"), True),
        (HOURS, (), True),
        (("03:00:00", "03:05:00"), (), False),
        # Turns of a long run, and a case without turns beside it.
        (HOURS, ("03:00:00",), True),
    ],
)
def test_rounds_of_resumed_cases_are_compared_one_by_one(
    naive: tuple[str, ...], sdpa: tuple[str, ...], marked: bool
) -> None:
    records = []
    for name, times in (("naive", naive), ("sdpa", sdpa)):
        record = make_record(attention=name, task="attention", samples_ms=SAMPLES)
        if times:
            moments = [f"2026-01-02T{time}+00:00" for time in times]
            record.notes["rounds_started_at"] = moments
        records.append(started(record, "03:00:00"))
    built = build_table("comparison", build_frame(records))
    assert built is not None
    assert (APART in built.footnotes) == marked


def test_strategies_are_marked_over_ddp() -> None:
    ddp = make_strategy_record("ddp_torch", ms=5.0)
    naive = started(make_strategy_record("ddp_naive", ms=6.0), "09:00:00")
    for name in ("data_parallel", "optimizer_state_sharding"):
        built = build_table(name, build_frame([ddp, naive]))
        assert built is not None
        assert APART in built.footnotes
        column = [column.header for column in built.columns].index("over DDP")
        assert {row[column][-1] for row in built.cells()} == {fmt.ABSENT, fmt.PILCROW}
