"""What else kept the host and the device busy while a round was measured."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import psutil
import torch

from harness.bench.devices import nvml_handle

try:
    import pynvml
except ImportError:
    # Installed on Linux only.
    pynvml = None


class LoadWatch:
    """Counts CPU time from its making: of the host, and of the processes that measure.

    The processes that measure are this one, its siblings (other ranks), its parent and all that
    they have started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began_s = time.monotonic()
        own = _own_processes()
        self._host_s, self._own_s = _busy_s(), _cpu_s(own)
        self._start = {"load_average": _load_average()} | _gpu_processes(device, own)

    def load(self) -> dict[str, Any]:
        """The load until now.

        ``other_cpu_share`` is the share of the host's CPU time, from 0 to 1, that processes other
        than ours took; ``other_cpus`` is the same as a number of CPUs, ``own_cpus`` is ours, and
        ``root`` is the process that ours descend from. ``load_average`` is that of one minute. On
        CUDA, ``device_processes`` lists the other processes on the device with their memory, and
        ``device_utilisation`` is the device's percentage at the end, our own work included.
        """
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        num_cpus = psutil.cpu_count() or 1
        own = _own_processes()
        own_s = _cpu_s(own) - self._own_s
        others_s = max(0.0, _busy_s() - self._host_s - own_s)
        others_cpus = min(others_s / elapsed_s, float(num_cpus))
        return {
            "seconds": round(elapsed_s, 3),
            "root": own[0].pid,
            "own_cpus": round(own_s / elapsed_s, 3),
            "other_cpus": round(others_cpus, 3),
            "other_cpu_share": round(others_cpus / num_cpus, 4),
            "load_average": _load_average(),
            "at_start": self._start,
        } | _gpu_processes(self._device, own)


def _busy_s() -> float:
    """CPU seconds of all processes of the host since it started; stolen ones count as busy."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guest)


def _cpu_s(processes: list[psutil.Process]) -> float:
    """CPU seconds of some processes and of the children that have ended before them."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
            total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def _own_processes() -> list[psutil.Process]:
    """This process, its parent, and the descendants of both.

    To find them takes milliseconds: all processes of the host are looked at.
    """
    own = psutil.Process()
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        if parent.pid > 1:
            return [parent, *parent.children(recursive=True)]
    with contextlib.suppress(psutil.Error):
        return [own, *own.children(recursive=True)]
    return [own]


def _load_average() -> float | None:
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


def _gpu_processes(device: torch.device, own: list[psutil.Process]) -> dict[str, Any]:
    """Other processes on the GPU, and its utilisation; empty on a CPU or without NVML.

    In a container NVML may give numbers of processes that mean nothing here. Then one of them is
    ours, and the memory of the others is not known.
    """
    handle = nvml_handle(device)
    if handle is None:
        return {}
    found: dict[str, Any] = {}
    with contextlib.suppress(pynvml.NVMLError):
        ours = {process.pid for process in own}
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        others = [
            {"memory_bytes": process.usedGpuMemory} for process in listed if process.pid not in ours
        ]
        if listed and len(others) == len(listed):
            others = [{"memory_bytes": None}] * (len(listed) - 1)
        found["device_processes"] = others
    with contextlib.suppress(pynvml.NVMLError):
        found["device_utilisation"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    return found
