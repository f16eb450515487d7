"""Records of attention with windows, caps and sinks, for tables and figures."""

from __future__ import annotations

from typing import Any

import msgspec
from records import make_record

from harness.store.record import Record

MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 128},
    {"window": 1024},
    {"softcap": 50.0},
    {"window": 128, "sinks": True},
)


def window_record(attention: str, mask: dict[str, Any], *, ms: float, oom: bool = False) -> Record:
    """A call over 8,192 tokens with these options of its attention."""
    passes = {"forward": ms, "backward": 2 * ms, "forward_backward": 3 * ms}
    samples = {key: [[0.99 * value, value, 1.01 * value]] for key, value in passes.items()}
    record = make_record(
        task="attention",
        mode="forward_backward",
        attention=attention,
        seq_len=8192,
        samples_ms=None if oom else samples,
        status="oom" if oom else "ok",
        message="CUDA out of memory" if oom else "",
    )
    words = "-".join(f"{key}{value}" for key, value in mask.items())
    case = {**record.case, "attention": {**record.case["attention"], **mask}}
    return msgspec.structs.replace(record, case=case, case_id=f"{record.case_id}{words}")


def window_examples() -> list[Record]:
    """flex is twice as fast as flash_attn_2, which has no memory for one; naive has no window."""
    found = []
    for mask in MASKS:
        ms = 0.1 + 0.01 * mask.get("window", 8192)
        found.append(window_record("flex", mask, ms=ms))
        found.append(window_record("flash_attn_2", mask, ms=2 * ms, oom="softcap" in mask))
    return found
