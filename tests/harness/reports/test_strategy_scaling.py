"""Efficiency over ranks says so when it cannot be."""

from __future__ import annotations

import pytest
from records import make_record, make_strategy_record

from harness.analysis.frame import build_frame
from harness.render.table import build_table


@pytest.mark.parametrize(
    ("strategy", "alone_ms", "notes"),
    [
        ("ddp_bucketed", 10.5, []),
        ("fsdp", 9.5, []),
        ("fsdp", 10.5, ["FSDP casts its share"]),
        ("ddp_bucketed", 100.0, ["Efficiency above 100%"]),
    ],
)
def test_more_than_all_of_one_rank(strategy: str, alone_ms: float, notes: list[str]) -> None:
    split = make_strategy_record(strategy, ms=10.0)
    case = split.case
    alone = make_record(
        samples_ms={"step": [[alone_ms] * 4]},
        model=case["model"]["name"],
        precision=case["precision"]["name"],
        seq_len=case["seq_len"],
        batch_size=case["batch_size"],
        attention=case["attention"]["name"],
    )
    for record in (alone, split):
        moment = {"sm_clock_mhz": 1700}
        record.device_state = [{"before": moment, "after": moment}]
    built = build_table("strategy_scaling", build_frame([alone, split]))
    assert built is not None
    together = built.rows[built.rows["world_size"] > 1]
    assert together["efficiency"].tolist() == pytest.approx([alone_ms / 10], rel=0.01)
    assert len(built.footnotes) == len(notes)
    assert all(map(str.startswith, built.footnotes, notes))
