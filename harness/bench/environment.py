"""A record's environment: the versions, the hardware and the settings a measurement depends on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from harness import __version__
from harness.bench.devices import nvml_handle
from harness.paths import ROOT
from kernels.registry import loaded_plugins

try:
    import pynvml
except ImportError:
    # Installed on Linux only.
    pynvml = None

REVISION_VARIABLE = "ATTNBENCH_REVISION"
"""Names the commit of a copy of the tree that has no history."""

PREFIXES = (
    *(
        "NCCL_",
        "CUDA_",
        "CUBLAS_",
        "CUDNN_",
        "NVIDIA_TF32_",
        "TORCH_",
        "PYTORCH_",
        "TORCHINDUCTOR_",
    ),
    *("TRITON_", "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_", "GLOO_", "ATTNBENCH_"),
)
"""Environment variables that a record keeps begin with one of these."""

_NO_SETTING = frozenset({REVISION_VARIABLE, "ATTNBENCH_PARENT"})
"""Kept elsewhere in the record, or the harness's own."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux: another one at each start of the kernel, the same in all containers on it."""
_MACHINE_ID = Path("/etc/machine-id")
"""Linux with systemd: of an installation; an image may give one to all its copies."""

_PRIVATE = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|KEY|AUTH|COOKIE", re.IGNORECASE)


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of this process, for the record of every case that it measures."""
    values: dict[str, Any] = {
        "attnbench": __version__,
        **revision(),
        "python": python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "platform": f"{platform.system()} {platform.release()}",
        "host": socket.gethostname(),
        "boot_id": _digest_of(_BOOT_ID),
        "machine_id": _digest_of(_MACHINE_ID),
        "cpu_model": cpu_model(),
        "num_cpus": os.cpu_count(),
        "cpu_affinity": _ranges(cpu_affinity()),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "variables": variables(os.environ),
        "plugins": loaded_plugins(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values |= {
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "gpu_uuid": f"GPU-{properties.uuid}",
            "gpu_uuids": _gpu_uuids(),
            "ecc": _ecc(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": _nccl_version(),
            "driver": driver_version(),
        }
    else:
        values["device_name"] = values["cpu_model"]
    return values


def library_versions(distributions: Iterable[str]) -> dict[str, str]:
    """The versions of those of the distributions that are installed here."""
    found = {name: version_of(name) for name in distributions}
    return {name: version for name, version in found.items() if version is not None}


def python_version() -> str:
    return platform.python_version()


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that may change a measurement: no secrets, and of a path only that it is set."""
    found = {}
    for name in sorted(environ):
        if name in _NO_SETTING or not name.startswith(PREFIXES) or _PRIVATE.search(name):
            continue
        value = environ[name]
        found[name] = "(set)" if re.search(r"[/\\~@]", value) else value[:200]
    return found


def cpu_affinity() -> list[int]:
    """The CPUs that this process may run on, sorted; all of them where nobody can say."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers in short: ``0-3,8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None if NVML cannot say."""
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return None


def _digest_of(path: Path) -> str | None:
    """A digest of the identity that a file holds, which nobody outside needs to know."""
    with contextlib.suppress(OSError):
        if text := path.read_text().strip():
            return hashlib.sha256(text.encode()).hexdigest()[:12]
    return None


def _gpu_uuids() -> list[str]:
    """All GPUs that NVML shows here, whichever this process may use; empty if it cannot say."""
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return sorted(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except Exception:
        return []


def _ecc(device: torch.device) -> bool | None:
    """Whether the GPU's memory corrects errors, which costs bandwidth; None if it cannot say."""
    handle = nvml_handle(device)
    if handle is not None:
        with contextlib.suppress(pynvml.NVMLError):
            return bool(pynvml.nvmlDeviceGetEccMode(handle)[0])
    return None


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:
        return None


def revision() -> dict[str, Any]:
    """The commit of the source tree, with ``+`` if it has changes, and whether it is only stated.

    A copy of the tree without its history can name its commit in ATTNBENCH_REVISION. Nothing
    checks that, and so the record says ``revision_stated``; its hashes of the source tell whether
    it is true. Where there is a history, the variable is not looked at.
    """
    stated = os.environ.get(REVISION_VARIABLE)
    if not (ROOT / ".git").exists():
        return {"git_revision": stated or None, "revision_stated": bool(stated)}
    found = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = _git("rev-parse", "--short", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no")
        found = commit + ("+" if changes else "")
    return {"git_revision": found, "revision_stated": False}


def _git(*arguments: str) -> str:
    # Without locks: a process that is killed while it holds the index leaves it locked, and the
    # user's next commit fails. `git describe --dirty` takes one even when told not to.
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def cpu_model() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
