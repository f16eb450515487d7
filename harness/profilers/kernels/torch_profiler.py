"""``profile=torch``: kernels by phase, range and category, from torch.profiler.

On a CPU operators take the place of kernels. The Chrome trace of each rank stays beside the
record, for chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from harness.cases.column import CaseColumn, note
from harness.cases.profiler import Profiler, profiler, require_steps
from kernels import accounting

if TYPE_CHECKING:
    from harness.bench.bench import Bench
    from harness.bench.program import Program
    from harness.cases.case import Case


KERNEL_PROFILE = CaseColumn(name="kernel_profile", read=note("kernel_profile"))


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
        import torch
        from torch.profiler import ProfilerActivity, record_function

        from harness.profilers.kernels.chrome_trace import read_chrome_trace
        from harness.profilers.kernels.profile_trace import STEP, WARM_UP
        from harness.profilers.kernels.summary import add_attention_costs, merge, summarise
        from harness.profilers.module_ranges import RangeTimer, ranges_on

        bench.stage("profiling")
        activities = [ProfilerActivity.CPU]
        if bench.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        timer = RangeTimer(bench.device, record_function)
        compiled = case.attention.compiles or case.task.compiles(case)
        with (
            ranges_on(program.model, record_function, compiled=compiled),
            torch.profiler.profile(activities=activities, record_shapes=True) as observed,
        ):
            for index in range(1 + self.steps):
                bench.barrier()
                with record_function(STEP if index else WARM_UP):
                    program.step(timer)
                    bench.synchronize()
        bench.stage("reading the profile")
        path = bench.artifact(f"kernels-rank{bench.rank}.trace.json.gz")
        observed.export_chrome_trace(str(path))
        del observed
        summary = summarise(read_chrome_trace(path, case.task.profiled_phases), "torch")
        add_attention_costs(summary["rows"], attention_costs(case, self.steps))
        bench.outcome.notes["kernel_profile"] = merge(bench.gather(summary))


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
