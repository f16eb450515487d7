"""Gradient scaling for ranks that hold different gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class AgreeingGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose ranks skip a step together, and keep one scale.

    With sharded gradients, an infinite one is on the rank that holds it alone.

    Args:
        group: the ranks that train one model together; the world if None.
    """

    def __init__(
        self, *arguments: Any, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._group = group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients; whether any was infinite, or not a number, on any rank."""
        with torch._C.DisableTorchFunctionSubclass():
            # Parts of gradients are scaled as any others; the ranks agree below.
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if dist.is_initialized():
            # A rank may have no gradient at all, and so no device to take from one.
            flag = found.setdefault(found_inf.device, found_inf)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return found
