"""Runs a case in this process and returns its record, for tests of profiles."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from harness.analysis.frame import build_frame
from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.render.table import Table, build_table
from harness.request.compose import compose_request
from harness.store.record import Phase, Record

SHORT = ("task.warmup_steps=1", "task.measure_steps=1")
TINY = ("model=tiny", "model.num_layers=2", "seq_len=32", "batch_size=2", *SHORT)


def case_of(*arguments: str, device: str = "cpu") -> Case:
    (case,) = compose_request([*arguments, f"device={device}"]).cases
    return case


def run(case: Case, artifacts: Path) -> Record:
    """The record that a worker would make of the case."""
    torch.manual_seed(case.seed)
    bench = Bench(device=torch.device(case.device), artifacts=artifacts)
    case.task.run(case, bench)
    outcome = bench.outcome
    return Record(
        case_id=case.id,
        case=case.to_dict(),
        status="ok",
        notes={**outcome.notes, "predicted_memory": case.task.predicted_memory(case)},
        memory=[outcome.memory],
        phases={
            name: Phase(clock=outcome.clocks[name], samples_ms=[samples])
            for name, samples in outcome.samples_ms.items()
        },
        work={name: asdict(work) for name, work in case.task.work(case).items()},
        environment={"device_name": "Example"},
    )


def table_of(name: str, *records: Record) -> Table:
    built = build_table(name, build_frame(records))
    assert built is not None
    return built


def row_of(built: Table | None, **where: str) -> dict[str, str]:
    """The one row whose cells match, by header."""
    assert built is not None
    rows = rows_of(built)
    matching = [row for row in rows if where.items() <= row.items()]
    assert len(matching) == 1, rows
    return matching[0]


def rows_of(built: Table) -> list[dict[str, str]]:
    headers = [item.full_header for item in built.columns]
    return [dict(zip(headers, cells, strict=True)) for cells in built.cells()]
