"""This host: warm workers on its CPU or its GPUs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.launcher import Launcher, launcher
from harness.record import RecordStore
from harness.runner import Progress, Runner, RunOptions

_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = [torch.cuda.get_device_name(i) for i in range(count)]
print(json.dumps({"torch": torch.__version__, "built_for": torch.version.cuda, "names": names}))
"""


@launcher("local")
@dataclass(kw_only=True, slots=True)
class Local(Launcher):
    """Runs every case on this host, one at a time."""

    vote_timeout_s: float = 60.0
    """How long a rank waits for the others to agree on how a case ended."""

    def __post_init__(self) -> None:
        if self.vote_timeout_s <= 0:
            raise ValueError(f"launcher.vote_timeout_s={self.vote_timeout_s}: must be positive")

    def resolve_device(self, device: str) -> str:
        if device == "cpu":
            return "cpu"
        found = probe_cuda()
        if device == "auto":
            return "cuda" if found["names"] else "cpu"
        if not found["names"]:
            raise ValueError(f"device=cuda: {found['reason']}; use device=cpu")
        return "cuda"

    def validate(self, cases: list[Case]) -> None:
        for case in cases:
            if case.device == "cuda" and case.world_size > len(probe_cuda()["names"]):
                axes = case.parallel.axes
                typed = " ".join(f"parallel.{axis}={ranks}" for axis, ranks in axes.items())
                typed = typed or f"task.ranks={case.world_size}"
                raise ValueError(
                    f"{typed}: needs {case.world_size} GPUs, this host has "
                    f"{len(probe_cuda()['names'])}; use fewer ranks, a scale= of the sweep that "
                    "has fewer, or device=cpu"
                )

    def launch(
        self, cases: list[Case], options: RunOptions, store: RecordStore, progress: Progress
    ) -> None:
        Runner(options, store, progress).run(cases)


@cache
def probe_cuda() -> dict[str, Any]:
    """Names of the CUDA devices that torch sees, and if there are none, why.

    Asked of torch itself, in a process of its own so that this one need not import it; not
    asked at all where no driver is installed.
    """
    drivers = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    if not any(Path(path).exists() for path in drivers) and shutil.which("nvidia-smi") is None:
        return {"names": [], "reason": "this host has no GPU driver"}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=180, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"names": [], "reason": f"torch cannot look for GPUs ({last})"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if not found["names"]:
        kind = "sees no GPU" if found["built_for"] else "is built for CPUs only"
        found["reason"] = f"the installed torch {found['torch']} {kind}"
    return found
