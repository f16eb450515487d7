"""Columns that choices declare: read from any record, in a stable order, and of one meaning."""

from __future__ import annotations

import pytest
from records import make_record

from harness.analysis.frame import build_frame
from harness.cases.column import Point, Points
from harness.render.table import build_table


class TestOldRecords:
    def test_choices_of_an_older_version_are_rendered(self) -> None:
        """Tasks, backends and strategies that are gone keep the names that they had."""
        record = make_record(samples_ms={"sorted": [[1.0, 2.0]]}, attention="flash_of_old")
        record.case["task"] = {"name": "task_of_old", "num_bins": 3}
        record.case["parallel"] = {"name": "strategy_of_old", "dp": 1}
        built = build_table("cases", build_frame([record]))
        assert built is not None
        row = built.rows.iloc[0]
        assert row["task"] == "task_of_old"
        assert row["attention"] == "flash_of_old"
        assert row["strategy"] == "strategy_of_old"
        assert row["median_ms"] == 1.5

    def test_columns_do_not_depend_on_the_records(self) -> None:
        """CSV files of all sweeps have the same leading columns."""
        frame = build_frame([make_record(samples_ms={"step": [[1.0]]})])
        assert list(build_frame([]).columns) == list(frame.columns)
        assert {"collective", "new_tokens", "kernel_profile"} <= set(frame.columns)


class TestPoints:
    def test_a_column_stands_behind_the_one_that_it_names(self) -> None:
        points = Points({name: Point(header=name) for name in ("model", "seed")})
        added = Point(header="added", after="model")
        points.declare("added", added)
        points.declare("added", added)
        assert list(points) == ["model", "added", "seed"]

    def test_one_name_has_one_meaning(self) -> None:
        points = Points({"model": Point(header="model")})
        with pytest.raises(ValueError, match="'model' is declared twice"):
            points.declare("model", Point(header="other"))
