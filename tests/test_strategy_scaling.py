"""Efficiency over ranks says so when it cannot be."""

from __future__ import annotations

import pytest
from records import make_record, make_strategy_record

from harness.frame import build_frame
from harness.table import build_table


@pytest.mark.parametrize(("alone_ms", "implausible"), [(10.5, False), (100.0, True)])
def test_more_than_all_of_one_rank(alone_ms: float, implausible: bool) -> None:
    split = make_strategy_record("ddp_bucketed", ms=10.0)
    case = split.case
    alone = make_record(
        samples_ms={"step": [[alone_ms] * 4]},
        model=case["model"]["name"],
        precision=case["precision"]["name"],
        seq_len=case["seq_len"],
        batch_size=case["batch_size"],
        attention=case["attention"]["name"],
    )
    built = build_table("strategy_scaling", build_frame([alone, split]))
    assert built is not None
    assert built.rows["efficiency"].max() == pytest.approx(alone_ms / 10, rel=0.01)
    assert any("above 100%" in note for note in built.footnotes) == implausible
