"""``profile=torch``: kernels by phase, range and category, from torch.profiler.

On a CPU operators take the place of kernels. The Chrome trace of each rank stays beside the
record, for chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from harness.bench.bench import Bench
from harness.bench.program import Program
from harness.cases.case import Case
from harness.cases.column import CaseColumn
from harness.cases.profiler import Profiler, profiler, require_steps
from harness.profilers import module_ranges
from harness.profilers.kernels import chrome_trace, profile_trace, summary
from harness.profilers.kernels.column import KERNEL_PROFILE
from kernels import accounting


@profiler("torch")
@dataclass(kw_only=True, slots=True)
class TorchProfiler(Profiler):
    """Kernel tables from torch.profiler."""

    steps: int = 2
    """Profiled steps, after one more that warms up the profiler."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (KERNEL_PROFILE,)

    def validate(self, case: Case) -> None:
        require_steps("profile.steps", self.steps)

    def run(self, case: Case, bench: Bench, program: Program) -> None:
        bench.stage("profiling")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if bench.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        make = torch.profiler.record_function
        timer = module_ranges.RangeTimer(bench.device, make)
        compiled = case.attention.compiles or case.task.compiles(case)
        with (
            module_ranges.ranges_on(program.model, make, compiled=compiled),
            torch.profiler.profile(activities=activities, record_shapes=True) as observed,
        ):
            for index in range(1 + self.steps):
                bench.barrier()
                with make(profile_trace.STEP if index else profile_trace.WARM_UP):
                    program.step(timer)
                    bench.synchronize()
        bench.stage("reading the profile")
        path = bench.artifact(f"kernels-rank{bench.rank}.trace.json.gz")
        observed.export_chrome_trace(str(path))
        del observed
        trace = chrome_trace.read_chrome_trace(path, case.task.profiled_phases)
        profile = summary.summarise(trace, "torch")
        summary.add_attention_costs(profile["rows"], attention_costs(case, self.steps))
        bench.outcome.notes["kernel_profile"] = summary.merge(bench.gather(profile))


def attention_costs(case: Case, steps: int) -> dict[tuple[str, bool], tuple[float, float]]:
    """FLOPs and bytes of a rank's attention calls, by phase and whether it is a recomputation."""
    problem = case.attention_problem
    if problem.packed:
        return {}
    layers = case.model.num_layers if case.model is not None else 1
    again = layers // case.checkpoint.blocks if case.checkpoint is not None else 0
    forward = (accounting.forward_flops(problem), accounting.forward_bytes(problem))
    backward = (accounting.backward_flops(problem), accounting.backward_bytes(problem))
    parts = {
        ("forward", False): (forward, layers),
        ("backward", False): (backward, layers),
        ("backward", True): (forward, again),
    }
    return {
        key: (flops * calls * steps / problem.cp, moved * calls * steps / problem.cp)
        for key, ((flops, moved), calls) in parts.items()
    }
