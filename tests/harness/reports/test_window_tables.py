"""The table and the figure of windows, caps and sinks, on records with known times."""

from __future__ import annotations

import pandas as pd
from records import in_rounds, make_record
from window_records import window_examples

from harness.analysis.frame import build_frame
from harness.render.figure import build_figure
from harness.render.table import Table, build_table, finding_of


def built() -> Table:
    table = build_table("windows", build_frame(list(map(in_rounds, window_examples()))))
    assert table is not None
    return table


def test_rows_name_the_mask_and_not_the_attention_by_it() -> None:
    rows = built().rows
    assert set(rows["attention"]) == {"flex", "flash_attn_2"}
    assert list(rows["window"].drop_duplicates()) == ["none", 128, 1024]
    assert set(rows["softcap"]) == {"none", 50.0}
    assert rows["sinks"].sum() == 2
    shown = [column.header for column in built().columns]
    assert {"window", "softcap", "sinks", "TFLOP/s", "of the fastest"} <= set(shown)
    assert "prefix" not in shown


def test_the_fastest_is_that_of_the_same_mask() -> None:
    rows = built().rows
    peers = rows[(rows["attention"] == "flash_attn_2") & (rows["status"] == "ok")]
    assert [round(value, 6) for value in peers["of_fastest"]] == [2.0] * len(peers)
    assert set(rows.loc[rows["attention"] == "flex", "of_fastest"]) == {1.0}
    assert "flex is fastest" in finding_of(built())


def test_what_all_rows_share_is_said_in_the_caption() -> None:
    only = [record for record in window_examples() if record.case["attention"].get("sinks")]
    table = build_table("windows", build_frame(only))
    assert table is not None
    assert "sinks" in table.caption.split("All rows:")[1]


def test_calls_without_any_have_no_such_table() -> None:
    record = make_record(
        task="attention", mode="forward", attention="flex", samples_ms={"forward": [[1.0, 1.0]]}
    )
    assert build_table("windows", build_frame([record])) is None


def test_the_figure_has_a_place_for_none() -> None:
    figure = build_figure("time_over_window", build_frame(list(map(in_rounds, window_examples()))))
    assert figure is not None
    axis = figure.figure.axes[0]
    figure.figure.draw_without_rendering()
    assert [text.get_text() for text in axis.get_xticklabels()] == ["128", "1,024", "none"]
    (line,) = [line for line in axis.get_lines() if line.get_label() == "flex"]
    assert list(pd.Series(line.get_ydata()).round(6)) == [4.14, 31.02, 246.06]
