"""Records of one training step launched, compiled and captured in CUDA graphs."""

from __future__ import annotations

from records import in_rounds, make_record

from harness.store.record import Record

WAYS = {
    "launched": (24.0, False, "none", "default"),
    "compiled by block": (20.0, False, "block", "default"),
    "compiled by block, reduce-overhead": (8.0, False, "block", "reduce-overhead"),
    "captured": (6.0, True, "none", "default"),
    "captured, compiled by block": (4.0, True, "block", "default"),
}


def step(time_ms: float, captured: bool, scope: str, mode: str, *, rounds: bool) -> Record:
    parts = {"forward": 0.25, "backward": 0.5, "optimizer": 0.25, "step": 1.0}
    record = make_record(
        compile_scope=scope,
        samples_ms={name: [[share * time_ms] * 6] for name, share in parts.items()},
    )
    record.case["compile"]["mode"] = mode
    record.case["task"]["cuda_graph"] = captured
    record.case_id += f"{mode}{captured}"
    record.phases["step"].host_ms = [[0.1 if captured else time_ms] * 6]
    return in_rounds(record) if rounds else record


def steps(*, rounds: bool = True) -> list[Record]:
    return [step(*way, rounds=rounds) for way in WAYS.values()]
