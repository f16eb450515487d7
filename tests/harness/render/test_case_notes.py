"""Footnotes on why cases of a table have no result, the order of names, and colours kept apart."""

from __future__ import annotations

import pytest
from records import make_record

from harness.analysis.frame import build_frame
from harness.cases.columns import POINTS
from harness.render.case_notes import reasons
from harness.render.files import to_markdown
from harness.render.palette import SPARE_COLOURS, colour_unlike
from harness.render.table import build_table
from harness.store.record import Record

KILLED = "rank {} was killed by signal 9 (SIGKILL) while checking"


def ended(status: str, message: str, seq_len: int) -> Record:
    return make_record(status=status, message=message, seq_len=seq_len)


def noted(*records: Record) -> list[str]:
    return reasons(build_frame(list(records)).drop_duplicates("case_id"))


class TestReasons:
    def test_equal_ones_are_counted_whatever_the_rank(self) -> None:
        found = noted(
            ended("failed", KILLED.format(1), 128), ended("failed", KILLED.format(3), 256)
        )
        expected = KILLED.format(9).replace("rank 9", "a rank")
        assert found == [f"Without a result: failed, {expected} (2 cases)."]

    def test_a_table_has_them_and_leaves_out_those_that_say_themselves_why(self) -> None:
        records = [
            make_record(samples_ms={"step": [[1.0]]}),
            ended("timeout", "exceeded timeout_s=3\nmore", 128),
            ended("oom", "CUDA out of memory", 256),
        ]
        table = build_table("summary", build_frame(records))
        assert table is not None
        text = to_markdown(table)
        assert "Without a result: timeout, exceeded timeout_s=3 (1 case)." in text
        assert "out of memory" not in text

    def test_three_and_how_many_more(self) -> None:
        (found,) = noted(*(ended("failed", f"error {n}", 2**n) for n in range(3, 8)))
        assert found.count("failed, error") == 3
        assert found.endswith("2 more in the report.")

    def test_none(self) -> None:
        assert noted(make_record(samples_ms={"step": [[1.0]]})) == []


def test_names_with_numbers_are_in_the_order_of_the_numbers() -> None:
    names = [f"ddp_bucketed(bucket_size_mb={size})" for size in (1.0, 10.0, 25.0, 100.0, 1000.0)]
    assert sorted(set(names), key=POINTS["strategy"].rank) == names
    mixed = ["1", "a", "", "a1b", "1.5"]
    assert sorted(mixed, key=POINTS["strategy"].rank) == ["", "1", "1.5", "a", "a1b"]


@pytest.mark.parametrize("taken", [["#44AA99"], ["#009E73", "#0072B2"]])
def test_another_colour_is_far_from_those_in_use(taken: list[str]) -> None:
    found = colour_unlike(taken)
    assert found in SPARE_COLOURS
    assert found not in {"#44AA99", "#6699CC"}
