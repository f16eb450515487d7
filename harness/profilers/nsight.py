"""``profile=nsys``: the same tables from NVIDIA Nsight Systems, where it is installed.

The case runs once more, in a process that ``nsys profile`` watches, with the capture range on
the steps after warm-up. The report stays beside the record, for its desktop program.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cases.profiler import Profiler, profiler, require_steps
from harness.paths import ROOT

if TYPE_CHECKING:
    from harness.bench.bench import Bench
    from harness.cases.case import Case


@profiler("nsys")
@dataclass(kw_only=True, slots=True)
class Nsight(Profiler):
    """Kernel tables from Nsight Systems."""

    steps: int = 2
    """Captured steps, after one more that warms up."""

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
        import json

        from harness.profilers.traces.kernels import summarise
        from harness.profilers.traces.nsys import read_nsys
        from harness.profilers.traces.ranges import RANGES

        bench.stage("profiling")
        # The process that is watched needs the memory that this one keeps for later.
        bench.release_memory()
        report = bench.artifact("kernels.nsys-rep")
        job = bench.artifact("nsys-job.json")
        job.write_text(json.dumps({"case": case.to_dict(), "steps": self.steps}))
        _run(profile_command(report, job))
        export = report.with_suffix(".sqlite")
        _run(export_command(report, export))
        bench.stage("reading the profile")
        bench.outcome.notes["kernel_profile"] = summarise(read_nsys(export, RANGES), "nsys")
        job.unlink()
        export.unlink()


def profile_command(report: Path, job: Path) -> list[str]:
    """``nsys profile`` around the program that repeats the case's steps."""
    import sys

    return [
        *("nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *("--force-overwrite=true", f"--output={report}"),
        *(sys.executable, "-m", "harness.profilers.traces.nsys_child", str(job)),
    ]


def export_command(report: Path, export: Path) -> list[str]:
    """``nsys export`` of its report as tables."""
    options = ("--type=sqlite", "--force-overwrite=true", f"--output={export}")
    return ["nsys", "export", *options, str(report)]


def _run(command: list[str]) -> None:
    """Run a program of Nsight Systems; RuntimeError with its last words if it fails."""
    import subprocess

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(
            f"{' '.join(command[:2])} ended with code {done.returncode}: "
            f"{words[-1] if words else 'without a word'}"
        )
