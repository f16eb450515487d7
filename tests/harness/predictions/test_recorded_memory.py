"""Predicted memory against the committed measurements on H200s."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

from benchmarks import bench_predictions
from benchmarks.bench_predictions import also_held, kind, peak_of_its_kernel, within
from harness.paths import ROOT
from harness.store.record import RecordStore
from kernels.flash.hopper import backward_memory, backward_schedule
from parallel.context.blocks.layouts import Contiguous

Ratios = dict[str, list[float]]


@pytest.fixture(scope="module")
def ratios() -> tuple[Ratios, Ratios]:
    """Predicted over measured by task: of all committed cases that have both, and of those whose
    peak is known to be theirs alone."""
    records, problems = RecordStore(ROOT / "results" / "h200").load()
    assert not problems
    found: Ratios = defaultdict(list)
    alone: Ratios = defaultdict(list)
    for record in records.values():
        peak = peak_of_its_kernel(record)
        if peak is None or peak.ratio is None:
            continue
        name = kind(record.case)
        found[name].append(peak.ratio)
        if also_held(record) is None:
            alone[name].append(peak.ratio)
    return found, alone


def test_of_all_cases(ratios: tuple[Ratios, Ratios]) -> None:
    """Old records included that hold more than their case."""
    everything = [ratio for found in ratios[0].values() for ratio in found]
    assert within(everything, 0.1) >= 0.95


@pytest.mark.parametrize(
    ("name", "limit", "least"),
    [
        ("attention", 0.1, 0.95),
        ("attention, rings", 0.1, 1.0),
        ("attention, heads exchanged", 0.03, 1.0),
        ("prefill", 0.03, 1.0),
        ("generate", 0.1, 1.0),
        ("roofline", 0.03, 1.0),
        ("train_step", 0.1, 0.95),
        ("train_step", 0.03, 0.95),
    ],
)
def test_of_each_task(ratios: tuple[Ratios, Ratios], name: str, limit: float, least: float) -> None:
    found = ratios[0].get(name, [])
    if not found:
        pytest.skip(f"no committed record of {name}")
    assert within(found, limit) >= least, sorted(found)


@pytest.mark.parametrize(
    ("name", "limit", "least"),
    [
        ("attention", 0.1, 0.98),
        ("attention, gathered", 0.03, 1.0),
        ("decode", 0.1, 1.0),
        ("collectives", 0.1, 1.0),
        ("precision_audit", 0.03, 1.0),
        ("train_step", 0.03, 0.99),
    ],
)
def test_where_a_case_is_measured_alone(
    ratios: tuple[Ratios, Ratios], name: str, limit: float, least: float
) -> None:
    found = ratios[1].get(name, [])
    if not found:
        pytest.skip(f"no committed record of {name}")
    assert within(found, limit) >= least, sorted(found)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("_workspace_of_parts", backward_memory.backward_workspace),
        ("_parts_by_mask", backward_schedule.fewest_parts),
    ],
)
def test_earlier_formulas_take_what_those_of_now_take(
    earlier: str, now: Callable[..., Any]
) -> None:
    """One that does not raises, and what was recorded would stand for it."""
    stand_in = getattr(bench_predictions, earlier)
    assert signature(stand_in).parameters == signature(now).parameters


def test_gathers_of_earlier_code_with_the_copy_that_they_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records, _ = RecordStore(ROOT / "results" / "h200").load()
    of_earlier = [
        record
        for record in records.values()
        if kind(record.case) == "attention, gathered" and also_held(record) is not None
    ]
    assert len(of_earlier) == 10
    monkeypatch.setattr(Contiguous, "is_in_order", False)
    for record in of_earlier:
        peak = peak_of_its_kernel(record)
        assert peak is not None
        assert peak.ratio == pytest.approx(1.0, abs=0.03), record.case_id
