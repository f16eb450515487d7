"""``profile=nsys``: kernel tables from NVIDIA Nsight Systems, where it is installed.

The case runs once more in processes that ``nsys profile`` watches, one for each rank and each under
an ``nsys`` of its own, which captures the steps after warm-up. The reports stay beside the record,
for the desktop program, which opens those of all ranks as one timeline.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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

_POLL_S = 0.2
"""How often a rank looks whether its own program, or that of another rank, has ended."""


@profiler("nsys")
@dataclass(kw_only=True, slots=True)
class Nsight(Profiler):
    """Kernel tables from Nsight Systems."""

    steps: int = 2
    """Captured steps, after one more that warms up."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (KERNEL_PROFILE,)

    def validate(self, case: Case) -> None:
        require_steps("profile.steps", self.steps)

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
        report = bench.artifact(f"kernels-rank{bench.rank}.nsys-rep")
        job = bench.artifact(f"nsys-job-rank{bench.rank}.json")
        meeting, failed = bench.artifact("nsys-meeting"), bench.artifact("nsys-failed")
        if bench.rank == 0:
            # Of an attempt that was killed.
            meeting.unlink(missing_ok=True)
            failed.unlink(missing_ok=True)
        written = {
            "case": case.to_dict(),
            "steps": self.steps,
            "device": str(bench.device),
            "rank": bench.rank,
            "world_size": bench.world_size,
            "meeting": str(meeting),
        }
        job.write_text(json.dumps(written), encoding="utf-8")
        bench.vote()
        _run(profile_command(report, job), failed)
        bench.vote()
        export = report.with_suffix(".sqlite")
        _run(export_command(report, export), failed)
        bench.vote()
        bench.stage("reading the profile")
        phases, ranges = case.task.profiled_phases, module_ranges.RANGES
        trace = nsight_export.read_nsight_export(export, phases, ranges)
        profile = summary.summarise(trace, "nsys")
        bench.outcome.notes["kernel_profile"] = summary.merge(bench.gather(profile))
        for file in (job, export, meeting):
            file.unlink(missing_ok=True)


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


def _run(command: list[str], failed: Path) -> None:
    """Run a program of Nsight Systems on this rank, while the other ranks run theirs.

    Args:
        failed: a file that a rank makes whose program failed. The others end theirs then, which
            would wait for it in a collective, and hear of it in the next vote.

    Raises RuntimeError with the last line that the program wrote if it fails.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not failed.exists():
                time.sleep(_POLL_S)
        finally:
            ended = process.poll() is not None
            if not ended:
                # nsys and the program that it watches.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not ended or not process.returncode:
            return
        failed.touch()
        output.seek(0)
        lines = output.read().strip().splitlines()
        raise RuntimeError(
            f"{' '.join(command[:2])} ended with code {process.returncode}: "
            f"{lines[-1] if lines else 'no output'}"
        )
