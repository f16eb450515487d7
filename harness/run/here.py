"""The machine of this process: its GPUs and their memory, or its CPU."""

from __future__ import annotations

import psutil

from harness.predictions.capacity import GIB, Machine
from harness.run import local

RANK_GIB = 0.1
"""Memory that no rank on a CPU does without; bounds their number."""


def machine_here(device: str = "auto") -> Machine:
    """This host with the device that ``device=`` resolves to.

    ValueError in one line for a GPU that is not there.
    """
    if local.Local(name="here").resolve_device(device) == "cuda":
        found = local.probe_cuda()
        return Machine(
            name=str(found["names"][0]),
            device="cuda",
            memory_bytes=float(min(found["memory_bytes"])),
            num_devices=len(found["names"]),
            gpus_per_host=len(found["names"]),
            is_here=True,
        )
    memory_bytes = psutil.virtual_memory().total
    most = max(1, int(memory_bytes / (RANK_GIB * GIB)))
    return Machine(
        name="this CPU",
        device="cpu",
        memory_bytes=memory_bytes,
        num_devices=most,
        gpus_per_host=most,
        is_here=True,
    )
