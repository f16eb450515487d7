"""The program that Nsight Systems watches: it runs one case again, with its steps captured.

``python -m harness.profilers.kernels.nsight_child JOB.json``; the file has the case and the number
of steps.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.bench.bench import Bench
from harness.bench.program import Program
from harness.cases.case import Case
from harness.cases.profiler import Profiler
from harness.profilers.kernels.profile_trace import STEP, WARM_UP
from harness.profilers.module_ranges import RangeTimer, ranges_on


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
    device = torch.device("cuda", torch.cuda.current_device())
    case.task.run(case, Bench(device=device))


if __name__ == "__main__":
    main(sys.argv[1:])
