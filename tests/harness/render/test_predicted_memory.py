"""Predicted beside measured peaks in tables and reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from profiles import rows_of
from records import make_record

from harness.analysis.frame import build_frame
from harness.analysis.predictions import ComparedPeak, compared_peak, peak_bytes
from harness.cases import format as fmt
from harness.cases.source import source_of
from harness.render.predicted_memory import ROWS_SHOWN, predicted_columns, summarise
from harness.render.rows import per_case
from harness.render.table import make_table
from harness.store.record import Record


def measured(times: float, **fields: Any) -> Record:
    """A training step whose peak is so many times the predicted one."""
    record = make_record(**fields)
    peak = int(times * peak_bytes(make_record()))
    record.memory = [
        {"source": "cuda", "peak_allocated_bytes": peak, "baseline_allocated_bytes": 0}
    ]
    record.case_id += f"-{times}"
    return record


def compiled() -> Record:
    return measured(0.5, compile_scope="model")


class TestSummary:
    def test_lists_what_is_off(self) -> None:
        found = summarise([measured(1.0), measured(1.05), measured(2.0), compiled()])
        assert found is not None
        assert found.sentence == (
            "peak memory: 2 of 3 predictions within 10%; 1 case not predicted"
        )
        ((case_id, _, _, ratio),) = found.off
        assert case_id.endswith("-2.0")
        assert ratio == fmt.factor(0.5)
        assert not found.counts_workspaces

    def test_says_what_was_measured_with_other_code(self) -> None:
        """Predictions are of the code of now."""
        old = [
            measured(times, source=dict.fromkeys(source_of(make_record().case, {}), "another"))
            for times in (3.0, 1.0)
        ]
        found = summarise([measured(1.0), measured(2.0), *old])
        assert found is not None
        assert found.sentence == (
            "peak memory: 2 of 4 predictions within 10%; "
            f"1 of the 2 others measured with other code than now ({fmt.DIAMOND})"
        )
        ratios = [ratio for *_, ratio in found.off]
        assert ratios == [fmt.factor(1 / 3) + fmt.DIAMOND, fmt.factor(0.5)]
        for records, others in ((old, "the other"), ([*old, *old], "all 2 others")):
            alone = summarise(records)
            assert alone is not None
            words = f"; {others} measured with other code than now ({fmt.DIAMOND})"
            assert alone.sentence.endswith(words)

    def test_stays_short(self) -> None:
        records = [measured(2 + index) for index in range(ROWS_SHOWN + 3)]
        found = summarise(records)
        assert found is not None
        assert len(found.off) == ROWS_SHOWN
        assert found.more == 3
        # The furthest off first.
        assert found.off[0][0].endswith(f"-{ROWS_SHOWN + 4}")

    def test_nothing_predicted_and_nothing_measured(self) -> None:
        found = summarise([compiled()])
        assert found is not None
        assert found.sentence == "peak memory: 1 case not predicted"
        on_cpu = measured(1.0)
        on_cpu.memory = [{"source": "rss", "peak_rss_bytes": 2**30}]
        assert summarise([on_cpu]) is None

    def test_a_bad_case_has_no_peak(self) -> None:
        assert compared_peak(measured(1.0, status="oom")) is None
        assert not ComparedPeak(predicted=None, measured=1.0).is_off


def test_columns_say_what_is_not_predicted() -> None:
    rows = per_case(build_frame([measured(1.0), measured(2.0), compiled()]))
    columns = predicted_columns(rows)
    table = make_table(caption="Peaks.", rows=rows, metrics=columns)
    found = rows_of(replace(table, name="peaks"))
    ratios = [row["predicted / measured"] for row in found]
    assert ratios[:2] == [fmt.factor(1), fmt.factor(0.5)]
    assert [row["predicted"] == "not predicted" for row in found] == [False, False, True]
    assert fmt.TIMES not in ratios[2]


@pytest.mark.parametrize("baseline", [True, False])
def test_workspaces_of_old_records(baseline: bool) -> None:
    """Two of 32 MiB: the forward and the backward pass multiply on threads of their own."""
    record = measured(1.0)
    if not baseline:
        del record.memory[0]["baseline_allocated_bytes"]
    peak = compared_peak(record)
    assert peak is not None
    assert peak.predicted is not None
    summary = summarise([record])
    assert summary is not None
    assert summary.counts_workspaces is not baseline
    assert peak.predicted - peak_bytes(record) == (0 if baseline else 64 * 2**20)
