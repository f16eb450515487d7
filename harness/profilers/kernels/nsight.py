"""``profile=nsys``: kernel tables from NVIDIA Nsight Systems, where it is installed.

The case runs once more in a process that ``nsys profile`` watches, which captures the steps
after warm-up. The report stays beside the record, for the desktop program.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.cases.column import CaseColumn
from harness.cases.profiler import Profiler, profiler, require_steps
from harness.paths import ROOT
from harness.profilers import module_ranges
from harness.profilers.kernels import nsight_export, summary
from harness.profilers.kernels.column import KERNEL_PROFILE


@profiler("nsys")
@dataclass(kw_only=True, slots=True)
class Nsight(Profiler):
    """Kernel tables from Nsight Systems."""

    steps: int = 2
    """Captured steps, after one more that warms up."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (KERNEL_PROFILE,)

    def validate(self, case: Case) -> None:
        require_steps("profile.steps", self.steps)
        if case.world_size > 1:
            raise ValueError(
                f"profile=nsys: watches one process, and this case has {case.world_size}; "
                "profile=torch writes a trace for each"
            )

    def supports(self, case: Case) -> str | None:
        if case.device != "cuda":
            return "Nsight Systems shows CUDA kernels; profile=torch works on a CPU"
        if shutil.which("nsys") is None:
            return "nsys is not on the PATH: install NVIDIA Nsight Systems, or use profile=torch"
        return None

    def after(self, case: Case, bench: Bench) -> None:
        bench.stage("profiling")
        # The watched process needs the memory that this one caches.
        bench.release_memory()
        report = bench.artifact("kernels.nsys-rep")
        job = bench.artifact("nsys-job.json")
        job.write_text(json.dumps({"case": case.to_dict(), "steps": self.steps}))
        _run(profile_command(report, job))
        export = report.with_suffix(".sqlite")
        _run(export_command(report, export))
        bench.stage("reading the profile")
        phases, ranges = case.task.profiled_phases, module_ranges.RANGES
        trace = nsight_export.read_nsight_export(export, phases, ranges)
        bench.outcome.notes["kernel_profile"] = summary.summarise(trace, "nsys")
        job.unlink()
        export.unlink()


def profile_command(report: Path, job: Path) -> list[str]:
    """The ``nsys profile`` command around the program that repeats the case's steps."""
    return [
        *("nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *("--force-overwrite=true", f"--output={report}"),
        *(sys.executable, "-m", "harness.profilers.kernels.nsight_child", str(job)),
    ]


def export_command(report: Path, export: Path) -> list[str]:
    """The ``nsys export`` command that turns a report into an SQLite file."""
    options = ("--type=sqlite", "--force-overwrite=true", f"--output={export}")
    return ["nsys", "export", *options, str(report)]


def _run(command: list[str]) -> None:
    """Run a program of Nsight Systems; RuntimeError with the last line it wrote if it fails."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(
            f"{' '.join(command[:2])} ended with code {done.returncode}: "
            f"{lines[-1] if lines else 'no output'}"
        )
