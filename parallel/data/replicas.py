"""Replicas at the start: a module on one device of each rank, with the values of the first rank."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


def require_one_device(module: nn.Module) -> None:
    """Raise ValueError that names the first tensor on another device than the ones before it."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if first is None:
            first = name, tensor.device
        if tensor.device != first[1]:
            raise ValueError(
                f"{name} is on {tensor.device} and {first[0]} on {first[1]}: move the whole module "
                "to the device of this rank"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: give the module memory first")


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks the values of the group's first."""
    for tensor in tensors:
        values = tensor.detach()
        sent = values.contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        if sent is not values:
            values.copy_(sent)


class Registrations:
    """How often any module of the process has been given a parameter or a module.

    A container whose module has new parameters learns of it by this number, at no cost in steps.
    """

    def __init__(self) -> None:
        self.count = 0
        register_module_parameter_registration_hook(self._note)
        register_module_module_registration_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


@cache
def registrations() -> Registrations:
    return Registrations()


def has_memory(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
