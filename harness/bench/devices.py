"""The device and host of this process: memory in use, and the GPU's state.

Nothing here changes a clock, a power limit or another setting of a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

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


def nvml_handle(device: torch.device) -> Any:
    """NVML's handle of a torch device; None on a CPU or without NVML."""
    if device.type != "cuda":
        return None
    return _nvml_handle(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _nvml_handle(device_index: int) -> Any:
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device_index).uuid
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:
        return None


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Clocks, power, temperature and throttle reasons; empty on a CPU or without NVML."""
    handle = nvml_handle(device)
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
