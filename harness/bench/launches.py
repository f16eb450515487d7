"""Counts the kernels of a step and the host's launches, with torch.profiler.

The steps are separate ones, after the measurement. On a CPU, operators that call no other operator
count as kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 2

_LAUNCHES = (
    *("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch"),
    *("cudaMemcpyAsync", "cudaMemsetAsync"),
)
"""Prefixes of the names of calls that put work on a stream."""


def count_launches(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """``kernels`` and ``launches`` of one step, and the ``unit`` of the first."""
    activities = [ProfilerActivity.CPU]
    on_cuda = device.type == "cuda"
    if on_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as observed:
        for _ in range(STEPS):
            step()
        if on_cuda:
            torch.cuda.synchronize(device)
    events = observed.events() or []
    if on_cuda:
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        launches = [event for event in events if event.name.startswith(_LAUNCHES)]
        return {
            "unit": "kernel",
            "kernels": len(kernels) / STEPS,
            "launches": len(launches) / STEPS,
        }
    operators = [event for event in events if event.name.startswith("aten::")]
    leaves = [event for event in operators if not event.cpu_children]
    return {
        "unit": "operator",
        "kernels": len(leaves) / STEPS,
        "launches": len(leaves) / STEPS,
    }
