"""The program that Nsight Systems watches: one rank runs its case again, with its steps captured.

``python -m harness.profilers.kernels.nsight_child JOB.json``; the file has the case, the number of
steps, the rank and its device, and a path at which the ranks meet.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.bench.bench import Bench
from harness.bench.program import Program
from harness.cases.case import Case
from harness.cases.profiler import Profiler
from harness.profilers.kernels.profile_trace import STEP, WARM_UP
from harness.profilers.module_ranges import RangeTimer, ranges_on
from harness.run.nodes.plain_objects import restrict_object_collectives

MEET_S = 120.0
"""How long a rank waits for the others' programs, which start together."""


@dataclass(kw_only=True, slots=True)
class _Capture(Profiler):
    """Repeats the step between the calls that start and stop the capture."""

    steps: int

    def run(self, case: Case, bench: Bench, program: Program) -> None:
        nvtx = torch.cuda.nvtx.range
        timer = RangeTimer(bench.device, nvtx)
        compiled = case.attention.compiles or case.task.compiles(case)
        with ranges_on(program.model, nvtx, compiled=compiled):
            for index in range(1 + self.steps):
                if index == 1:
                    torch.cuda.profiler.start()
                bench.barrier()
                with (
                    torch.autograd.profiler.emit_nvtx(),
                    nvtx(STEP if index else WARM_UP),
                ):
                    program.step(timer)
                    bench.synchronize()
            torch.cuda.profiler.stop()


def main(arguments: list[str]) -> None:
    job: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    case = Case.from_dict(job["case"])
    # The record has its measured passes already.
    task: Any = case.task
    task = replace(task, warmup_steps=1, measure_steps=1)
    case = replace(case, task=task, profile=_Capture(name="nsys", steps=job["steps"]))
    torch.manual_seed(case.seed)
    torch.set_float32_matmul_precision("high" if case.precision.tf32 else "highest")
    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, world_size = job["rank"], job["world_size"]
    votes = join(device, rank, world_size, job["meeting"]) if world_size > 1 else None
    case.task.run(case, Bench(device=device, rank=rank, world_size=world_size, vote_group=votes))
    if votes is not None:
        dist.destroy_process_group()


def join(device: torch.device, rank: int, world_size: int, meeting: str) -> dist.ProcessGroup:
    """Meet the other ranks at a file and make the default group; the group for votes is returned.

    Raises an error of torch.distributed if a rank does not come within :data:`MEET_S`.
    """
    restrict_object_collectives()
    store = dist.FileStore(meeting, world_size)
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in range(world_size)], timedelta(seconds=MEET_S))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size
    )
    votes = dist.new_group(backend="gloo")
    assert votes is not None
    return votes


if __name__ == "__main__":
    main(sys.argv[1:])
