"""The roof of a device: what is timed, what is computed from it, and which roof figures draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import case_of, rows_of, run, table_of
from records import make_record

from harness.analysis.frame import build_frame
from harness.bench.outcome import WrongResult
from harness.render.figure import draw
from harness.render.roof import DATASHEET, MEASURED, with_measured_roof
from harness.request.compose import compose_request
from harness.store.record import Record

SMALL = (
    *("task=roofline", "task.copy_mib=1", "task.matmul_size=64"),
    *("task.warmup_steps=1", "task.measure_steps=3"),
)


def measured(copy_ms: float, matmul_ms: float, precision: str = "bf16") -> Record:
    """A GiB copied and a square of 8,192 multiplied on the records' device."""
    record = make_record(
        task="attention",
        mode="forward",
        precision=precision,
        samples_ms={"copy": [[2 * copy_ms, copy_ms]], "matmul": [[2 * matmul_ms, matmul_ms]]},
    )
    record.case["task"] = {"name": "roofline", "copy_mib": 1024, "matmul_size": 8192}
    record.case_id = f"roofline-{precision}"
    record.work = {
        "copy": {"flops": 0.0, "bytes": 2.0 * 2**30, "tokens": None},
        "matmul": {"flops": 2.0 * 8192**3, "bytes": None, "tokens": None},
    }
    return record


def attention() -> Record:
    record = make_record(
        task="attention",
        mode="forward",
        attention="sdpa_flash",
        samples_ms={"forward": [[1.0, 1.0]]},
    )
    record.work["forward"]["bytes"] = 1e9
    return record


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_runs_and_checks_itself(tmp_path: Path, precision: str) -> None:
    case = case_of(*SMALL, f"precision={precision}")
    record = run(case, tmp_path)
    assert set(record.phases) == {"copy", "matmul"} == set(record.work)
    assert record.work["copy"]["bytes"] == 2 * 2**20
    assert record.work["matmul"]["flops"] == 2 * 64**3
    assert len(record.phases["copy"].samples_ms[0]) == 3


def test_a_wrong_product_is_no_roof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = torch.matmul

    def wrong(left: Any, right: Any, *, out: Any) -> Any:
        return true(left, right, out=out).mul_(1.01)

    monkeypatch.setattr(torch, "matmul", wrong)
    with pytest.raises(WrongResult, match="relative error of the product"):
        run(case_of(*SMALL), tmp_path)


def test_rates_by_hand() -> None:
    (row,) = rows_of(table_of("device_roof", measured(copy_ms=0.5, matmul_ms=1.5)))
    # 2 GiB in half a millisecond; 1.0995e12 FLOPs in one and a half.
    assert row["copy (GB/s)"] == "4,290†"
    assert row["matmul (TFLOP/s)"] == "733†"
    assert row["of the peak (%)"] == "74.1"
    assert row["of the datasheet (%)"] == "89.5"
    assert row["ridge (FLOP/byte)"] == "171"


def test_figures_prefer_the_measured_roof() -> None:
    points, roof = attention(), measured(copy_ms=0.5, matmul_ms=1.5)
    alone, both = build_frame([points]), build_frame([points, roof])
    rows, words = with_measured_roof(alone, alone)
    assert words == DATASHEET
    assert rows["peak_tflops"].tolist() == [989.4]
    rows, words = with_measured_roof(both, both[both["task"] == "attention"])
    assert words == MEASURED
    assert rows["peak_tflops"].tolist() == pytest.approx([733.0], rel=1e-3)
    assert rows["memory_bandwidth_gb_s"].tolist() == pytest.approx([4295], rel=1e-3)
    drawn = draw("roofline", both)
    assert drawn is not None
    assert MEASURED in drawn[0]


def test_a_roof_of_another_precision_is_none() -> None:
    both = build_frame([attention(), measured(copy_ms=0.5, matmul_ms=1.5, precision="fp32")])
    _, words = with_measured_roof(both, both[both["task"] == "attention"])
    assert words == DATASHEET


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("task.copy_mib=0", r"task\.copy_mib=0: must be at least 1"),
        ("task.matmul_size=-1", r"task\.matmul_size=-1: must be at least 1"),
        ("parallel=ddp_torch", r"parallel\.dp=2: task=roofline runs in one process"),
    ],
)
def test_words_for_what_makes_no_sense(argument: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose_request(["task=roofline", argument, "device=cpu"])


@pytest.mark.parametrize("sweep", ["nsys_profile", "memory_profiling", "checkpointing", "roofline"])
@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_sweeps_of_profiles(sweep: str, scale: str) -> None:
    cases = compose_request([f"sweeps={sweep}", f"scale={scale}", "device=cpu"]).cases
    profiles = {case.profile.name for case in cases if case.profile is not None}
    assert profiles == {"memory" if sweep in ("memory_profiling", "checkpointing") else "torch"}
    if sweep == "nsys_profile" and scale == "full":
        assert len(cases) == 5 * 4 * 2
    if sweep == "memory_profiling" and scale == "full":
        found = {
            (case.seq_len, case.precision.name, case.task.mode)  # type: ignore[attr-defined]
            for case in cases
            if case.attention.name == "naive"
        }
        assert len(found) == 3 * 2 * 2
