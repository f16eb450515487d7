"""Records of packed batches of documents, as a run of them would write."""

from __future__ import annotations

from dataclasses import asdict

from records import ENVIRONMENT

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.store.record import Phase, Record

SHAPE = (
    *("task=document_batch", "task.num_heads=4", "task.num_kv_heads=2", "task.head_dim=16"),
    *("batch_size=6", "seq_len=32", "task.warmup_steps=1", "task.measure_steps=2"),
)


def make_case(*arguments: str) -> Case:
    given = {argument.split("=")[0] for argument in arguments}
    shape = [item for item in SHAPE if item.split("=")[0] not in given]
    (case,) = compose_request([*shape, *arguments, "device=cpu"]).cases
    return case


def record_of(*arguments: str) -> Record:
    case = make_case("seq_len=64", "batch_size=16", *arguments)
    samples = [[1.0] * 3] * case.world_size
    return Record(
        case_id=case.id,
        case=case.to_dict(),
        status="ok",
        phases={
            name: Phase(clock="perf_counter", samples_ms=samples)
            for name in ("forward", "backward", "forward_backward")
        },
        work={name: asdict(work) for name, work in case.task.work(case).items()},
        environment=dict(ENVIRONMENT),
        memory=[{"source": "rss", "peak_allocated_bytes": 2**30}] * case.world_size,
        check={"errors": {"o": 1e-6}, "tolerance": 1e-4},
        notes={"kernel": "naive", "transport": "some"} if case.parallel.cp > 1 else {},
    )
