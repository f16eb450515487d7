"""Counts the collective operations of a training step, with their sizes.

It counts calls of c10d's operators, below Python's functions and above the backends, so that
calls from PyTorch's own C++ containers are included. Copies out of a peer's symmetric memory are
no collective operations and are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.bench.bench import Bench


@dataclass(kw_only=True, slots=True, frozen=True)
class _Operation:
    """An operator of c10d: its collective, and the argument whose size is nccl-tests' S."""

    collective: str
    sized: int = 0
    per_rank: bool = False
    """Whether that argument is one rank's part of S."""


_OPERATIONS = {
    "c10d.allreduce_": _Operation(collective="all_reduce"),
    "c10d.allreduce_coalesced_": _Operation(collective="all_reduce"),
    "c10d.broadcast_": _Operation(collective="broadcast"),
    "c10d.allgather_": _Operation(collective="all_gather"),
    "c10d._allgather_base_": _Operation(collective="all_gather"),
    "c10d.allgather_coalesced_": _Operation(collective="all_gather"),
    "c10d.allgather_into_tensor_coalesced_": _Operation(collective="all_gather"),
    "c10d.reduce_scatter_": _Operation(collective="reduce_scatter", sized=1),
    "c10d._reduce_scatter_base_": _Operation(collective="reduce_scatter", sized=1),
    "c10d.reduce_scatter_tensor_coalesced_": _Operation(collective="reduce_scatter", sized=1),
    "c10d.alltoall_": _Operation(collective="all_to_all", sized=1),
    "c10d.alltoall_base_": _Operation(collective="all_to_all", sized=1),
    "c10d.send": _Operation(collective="send_recv"),
    "_c10d_functional.all_reduce": _Operation(collective="all_reduce"),
    "_c10d_functional.all_reduce_": _Operation(collective="all_reduce"),
    "_c10d_functional.all_reduce_coalesced": _Operation(collective="all_reduce"),
    "_c10d_functional.broadcast": _Operation(collective="broadcast"),
    "_c10d_functional.all_gather_into_tensor": _Operation(collective="all_gather", per_rank=True),
    "_c10d_functional.all_gather_into_tensor_out": _Operation(
        collective="all_gather", per_rank=True
    ),
    "_c10d_functional.all_gather_into_tensor_coalesced": _Operation(
        collective="all_gather", per_rank=True
    ),
    "_c10d_functional.reduce_scatter_tensor": _Operation(collective="reduce_scatter"),
    "_c10d_functional.reduce_scatter_tensor_coalesced": _Operation(collective="reduce_scatter"),
    "_c10d_functional.all_to_all_single": _Operation(collective="all_to_all"),
}

_SILENT = ("recv", "wait", "barrier", "monitored_barrier")
"""Operators that move nothing that another operator has not counted."""


class TrafficCounter(TorchDispatchMode):
    """Counts operators while it is entered, also those of autograd's threads.

    An operator that the table lacks is counted under its own name, which no formula knows;
    dropping it would make an incomplete count look complete.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int], list[int]] = {}

    def counts(self) -> list[dict[str, Any]]:
        """``calls`` and ``bytes`` (the sum of sizes S) by collective and number of ranks."""
        return [
            {"collective": name, "ranks": ranks, "calls": calls, "bytes": size}
            for (name, ranks), (calls, size) in sorted(self._counts.items())
        ]

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Do nothing, in the place of a timer's ``phase``."""
        return contextlib.nullcontext()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Its own dispatch turns this into operations on local tensors, which come here.
            return NotImplemented
        namespace, _, name = str(func._schema.name).partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self._count(f"{namespace}.{name}", args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own_name = name.partition(".")[2]
        if own_name.startswith(_SILENT):
            return
        operation = _OPERATIONS.get(name, _Operation(collective=own_name.rstrip("_")))
        ranks = _group_size([*args, *kwargs.values()])
        if ranks is None:
            # Bookkeeping on results of operations, such as for autograd.
            return
        tensors = [leaf for leaf in tree_leaves(args[operation.sized]) if isinstance(leaf, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        count = self._counts.setdefault((operation.collective, ranks), [0, 0])
        count[0] += 1
        count[1] += size * (ranks if operation.per_rank else 1)


def _group_size(arguments: list[Any]) -> int | None:
    """The number of ranks in the process group among an operator's arguments, if there is one."""
    for argument in arguments:
        if isinstance(argument, dist.ProcessGroup):
            return int(argument.size())
        if isinstance(argument, str):
            with contextlib.suppress(ValueError, RuntimeError):
                return int(dist.distributed_c10d._resolve_process_group(argument).size())
        if type(argument).__name__ == "ScriptObject":
            with contextlib.suppress(RuntimeError, TypeError):
                return int(dist.ProcessGroup.unbox(argument).size())
    return None


def note_traffic(bench: Bench, step: Callable[[Any], None]) -> None:
    """Run a step on all ranks and note what each of them sent as ``traffic``."""
    bench.stage("counting")
    bench.barrier()
    counter = TrafficCounter()
    with counter:
        step(counter)
    bench.synchronize()
    bench.outcome.notes["traffic"] = bench.gather(counter.counts())
