"""Whether a case fits a machine: its number of devices, and the memory of each.

A machine is the one that plans, or any that ``conf/hardware`` describes, so that a laptop says what
fits a cluster. Predictions count tensors; the CUDA context, workspaces of libraries and fragments
of the allocator take their part of a device besides, :data:`USABLE` leaves that out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.cases import format as fmt
from harness.cases.case import Case
from harness.cases.hardware import hardware_named, hardware_names
from harness.did_you_mean import did_you_mean

GIB = 2**30

USABLE = 0.95
"""Part of a GPU's memory that tensors may fill. Of 140 GiB the context, cuBLAS and NCCL take about
2 GiB, and committed training steps reserve up to 4% more than they allocate."""

USABLE_OF_HOST = 0.9
"""Part of a host's memory for all its ranks: others run there too."""

GPUS_PER_HOST = 8
"""Of a host with GPUs that is not here: an HGX or DGX board."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Machine:
    """Where cases would run."""

    name: str
    device: str
    """cpu or cuda."""
    memory_bytes: float
    """Of one GPU, or of the host where cases run on CPUs."""
    num_devices: int
    """GPUs of all its hosts; on a CPU the most ranks."""
    gpus_per_host: int = GPUS_PER_HOST
    is_here: bool = False

    @property
    def usable_bytes(self) -> float:
        """What tensors of all ranks that share a memory may fill."""
        return self.memory_bytes * (USABLE if self.device == "cuda" else USABLE_OF_HOST)

    def usable_of_rank(self, world_size: int) -> float:
        """What one of ``world_size`` ranks may fill: on a CPU they share the host's memory."""
        return self.usable_bytes / (1 if self.device == "cuda" else world_size)


def machine_named(name: str, num_devices: int | None = None) -> Machine:
    """A machine of ``conf/hardware``, by its file's name, an alias, or the driver's name.

    Raises ValueError in one line, with the name that was probably meant, if there is none.
    """
    hardware = hardware_named(name)
    if hardware is None:
        files = hardware_names()
        aliases = (alias for hardware in files.values() for alias in hardware.aliases)
        known = sorted({*files, *aliases, "here"})
        raise ValueError(
            f"machine={name}: no such hardware{did_you_mean(name, known)}; there are "
            f"{', '.join(known)}"
        )
    return Machine(
        name=name,
        device="cuda",
        memory_bytes=hardware.memory_gib * GIB,
        num_devices=num_devices or GPUS_PER_HOST,
    )


def ranks_on_each_host(ranks: int, most: int) -> int | None:
    """Ranks on each of the fewest hosts that hold equally many, at most ``most``.

    None where every rank would need a host of its own, and hosts have room for more.
    """
    hosts = math.ceil(ranks / most)
    while ranks % hosts:
        hosts += 1
    return None if hosts == ranks > 1 and most > 1 else ranks // hosts


def predicted_bytes(case: Case) -> float | None:
    """Predicted bytes at the peak on one rank; None where there is no formula."""
    predicted = case.task.predicted_memory(case)
    return None if predicted is None else sum(predicted.values())


def why_not(case: Case, machine: Machine) -> str | None:
    """Why a machine cannot run a case, by its devices and memory: None, or a few words.

    ``needs 16 GPUs, has 8`` or ``does not fit (needs 356 GiB, has 134)``.
    """
    if case.world_size > machine.num_devices:
        noun = "GPUs" if machine.device == "cuda" else "ranks"
        return f"needs {case.world_size:,} {noun}, has {machine.num_devices:,}"
    needed = predicted_bytes(case)
    usable = machine.usable_of_rank(case.world_size)
    if needed is None or needed <= usable:
        return None
    return f"does not fit (needs {fmt.number(needed / GIB)} GiB, has {fmt.number(usable / GIB)})"
