"""The first length of attention that does not fit, by tensor: measured or predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from profiles import SHORT, case_of, row_of, rows_of, run, table_of

from harness.analysis.frame import build_frame
from harness.render.table import build_table, finding_of
from harness.store.record import Record

GIB = 2**30
POINT = ("task=attention", "attention=naive", "task.num_heads=1", "task.head_dim=16", *SHORT)


def record_of(seq_len: int, *, device_bytes: float, tmp_path: Path) -> Record:
    record = run(case_of(*POINT, f"seq_len={seq_len}", "batch_size=2"), tmp_path)
    record.environment["device_memory_bytes"] = int(device_bytes)
    return record


def out_of_memory(record: Record) -> Record:
    record.status, record.phases = "oom", {}
    record.error = {"message": "out of memory"}
    return record


def test_lengths_are_doubled_until_one_does_not_fit(tmp_path: Path) -> None:
    """Of 128 tokens four matrices of 2 x 128^2 float32 and a mask, four times that of 256."""
    needs = {n: 4 * 4 * 2 * n**2 + n**2 + 6 * 4 * 2 * n * 16 for n in (128, 256, 512)}
    record = record_of(128, device_bytes=needs[256] + 1, tmp_path=tmp_path)
    table = table_of("attention_accounting", record)
    rows = rows_of(table)
    assert [(row["seq_len"], row["sum fits"]) for row in rows] == [
        ("128", "yes"),
        ("256", "yes"),
        ("512", "no"),
    ]
    assert [row["all, measured"] == "not measured" for row in rows] == [False, True, True]
    assert table.rows["needs"].tolist() == pytest.approx(
        [needs[length] / GIB for length in (128, 256, 512)]
    )
    assert table.rows["part scores"].iloc[2] == pytest.approx(4 * 4 * 2 * 512**2 / GIB)
    # q, k, v and o, and a float32 for each row of scores.
    without = 4 * 2 * 512 * (4 * 16 + 1)
    assert table.rows["kept_without"].iloc[2] == pytest.approx(without / GIB)
    assert "whose tensors do not fit is 512, by prediction and not" in finding_of(table)


def test_a_length_that_ran_out_of_memory_says_so(tmp_path: Path) -> None:
    small = record_of(128, device_bytes=700_000, tmp_path=tmp_path)
    large = out_of_memory(record_of(256, device_bytes=700_000, tmp_path=tmp_path))
    table = table_of("attention_accounting", small, large)
    assert row_of(table, seq_len="256")["all, measured"] == "OOM"
    assert "whose tensors do not fit is 256, as measured" in finding_of(table)
    assert "ran out of memory too" not in finding_of(table)


def test_a_length_whose_tensors_would_fit_may_run_out_of_memory(tmp_path: Path) -> None:
    device_bytes = 4_000_000
    lengths = [
        record_of(length, device_bytes=device_bytes, tmp_path=tmp_path)
        for length in (128, 256, 512)
    ]
    table = table_of("attention_accounting", lengths[0], *map(out_of_memory, lengths[1:]))
    assert row_of(table, seq_len="256") | {"all, measured": "OOM", "sum fits": "yes"} == row_of(
        table, seq_len="256"
    )
    assert "256 ran out of memory too, although its tensors are 0.00" in finding_of(table)


def test_nothing_is_said_of_a_device_of_unknown_memory(tmp_path: Path) -> None:
    record = run(case_of(*POINT, "seq_len=64", "batch_size=2"), tmp_path)
    assert build_table("attention_accounting", build_frame([record])) is None
