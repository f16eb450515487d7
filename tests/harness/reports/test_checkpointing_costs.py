# ruff: noqa: RUF001 - sentences use typographic signs
"""What checkpointing is said to cost, from records."""

from __future__ import annotations

from records import in_rounds, make_record

from harness.analysis.frame import build_frame
from harness.render.table import build_table, finding_of
from harness.store.record import Record


def step(checkpoint: str, time_ms: float, peak_bytes: int, *, device_ms: float) -> Record:
    record = make_record(device="cuda", samples_ms={"step": [[time_ms] * 5]})
    record.case["checkpoint"] = {"scope": checkpoint}
    record.case_id += checkpoint
    record.memory = [{"source": "cuda", "peak_allocated_bytes": peak_bytes}]
    record = in_rounds(record)
    phase = record.phases["step"]
    phase.host_ms = [[time_ms] * len(phase.samples_ms[0])]
    phase.device_ms = [[device_ms] * 3]
    return record


def said(device_ms: float) -> str:
    """Of blocks that take twice the time, on a device that needs ``device_ms`` of it."""
    records = [
        step("none", 10.0, 2**31, device_ms=10.0),
        step("block", 20.0, 2**30, device_ms=device_ms),
    ]
    table = build_table("checkpointing", build_frame(records))
    assert table is not None
    return finding_of(table)


def test_every_second_block_is_called_by_its_key() -> None:
    other = step("every_k", 12.0, 2**30, device_ms=12.0)
    other.case["checkpoint"]["every"] = 2
    table = build_table(
        "checkpointing", build_frame([step("none", 10.0, 2**31, device_ms=10.0), other])
    )
    assert table is not None
    assert finding_of(table) == (
        "checkpoint=every_k (every 2) needs 0.50× the memory of none and 1.20× its time."
    )


def test_the_host_s_time_is_no_cost_of_checkpointing() -> None:
    assert said(20.0) == "checkpoint=block needs 0.50× the memory of none and 2.00× its time."
    assert said(12.0) == "checkpoint=block needs 0.50× the memory of none."
