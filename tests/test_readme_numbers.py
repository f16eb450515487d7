"""Numbers of the README beside the committed tables that they come from."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness.analysis.frame import build_frame
from harness.render.table import build_table
from harness.store.record import RecordStore
from harness.store.sweep_plan import read_plan

ROOT = Path(__file__).parents[1]

SOURCES = {
    "checkpointing": (
        ("in {:.2f} times the memory with naive", "attention == 'naive'", "memory_ratio"),
        ("and {:.2f} times with `sdpa`", "attention == 'sdpa'", "memory_ratio"),
    ),
    "roofline": (("matmul {:.0f} TFLOP/s", "precision == 'bf16'", "matmul_tflops"),),
}
"""By sweep of results/h200: the README's words, a filter of rows, and the column of the number."""

TABLES = {
    "checkpointing": ("checkpointing", "checkpoint == 'block'"),
    "roofline": ("device_roof", ""),
}


@pytest.mark.parametrize("label", SOURCES)
def test_numbers_are_those_of_the_table(label: str) -> None:
    results = ROOT / "results" / "h200"
    text = " ".join((ROOT / "README.md").read_text().split())
    name, common = TABLES[label]
    rows = rows_of(results, label, name)
    rows = rows.query(common) if common else rows
    for words, chosen, column in SOURCES[label]:
        (value,) = rows.query(chosen)[column].dropna().unique()
        assert words.format(value) in text


def rows_of(results: Path, label: str, name: str) -> pd.DataFrame:
    plan, records = read_plan(results, label), RecordStore(results).load()[0]
    table = build_table(
        name,
        build_frame([records[key] for key in plan.case_ids if key in records], records.values()),
    )
    assert table is not None
    return table.rows
