"""The device and host of this process: memory in use, the GPU's state, a record's environment.

Nothing here changes a clock, a power limit or another setting of a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from harness import __version__
from harness.paths import ROOT

try:
    import pynvml
except ImportError:
    # Installed on Linux only.
    pynvml = None

# NVML's names of the reasons for which a GPU holds its clocks down
# (nvml.h, nvmlClocksEventReasons).
_THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def release_resident() -> None:
    """Return freed memory to the system (glibc: malloc_trim)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Resident set size of this process."""
    return int(psutil.Process().memory_info().rss)


def reset_peak_resident() -> None:
    """Reset the peak of the resident set (Linux: proc(5), clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """Peak resident set size since :func:`reset_peak_resident`."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def limit_host_memory() -> None:
    """Limit this process to the free memory of the host, so that a larger allocation fails.

    Without a limit, a CPU case that is too large drives a laptop into swap until the kernel
    kills something; with it, the case becomes an out-of-memory row.
    """
    with contextlib.suppress(ValueError, OSError):
        available = psutil.virtual_memory().available
        in_use = psutil.Process().memory_info().vms
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (in_use + available, hard))


@cache
def _nvml_handle(device_index: int) -> Any:
    """NVML's handle of a torch device; None without NVML."""
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device_index).uuid
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:
        return None


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Clocks, power, temperature and throttle reasons; empty on a CPU or without NVML."""
    if device.type != "cuda":
        return {}
    handle = _nvml_handle(device.index if device.index is not None else torch.cuda.current_device())
    if handle is None:
        return {}
    state: dict[str, Any] = {}
    with contextlib.suppress(pynvml.NVMLError):
        state["sm_clock_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        state["memory_clock_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        state["power_w"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
        state["temperature_c"] = pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU
        )
        mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        state["throttle_reasons"] = [name for bit, name in _THROTTLE_REASONS.items() if mask & bit]
    return state


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and the hardware that a measurement depends on."""
    values: dict[str, Any] = {
        "attnbench": __version__,
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "platform": f"{platform.system()} {platform.release()}",
        "cpu_model": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values |= {
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver_version(),
        }
    else:
        values["device_name"] = values["cpu_model"]
    return values


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _driver_version() -> str | None:
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return None


def _git_revision() -> str | None:
    """The commit of the source tree, with ``+`` if it has changes; None if unknown.

    A copy of the tree without its history can name the commit in ATTNBENCH_REVISION.
    """
    stated = os.environ.get("ATTNBENCH_REVISION")
    if stated:
        return stated
    if not (ROOT / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
