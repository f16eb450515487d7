"""The parts of a training step that the tests of ZeRO and FSDP share."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from parallel.data import FSDP


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def finish(model: nn.Module) -> None:
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


def sharded(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Biases too, unlike by :func:`data_parallel_training.fsdp`."""
    return FSDP(module, replicate_below=0, group=group)
