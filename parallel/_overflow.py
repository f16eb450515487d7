"""Agreement on whether float16 gradients overflowed, between ranks that hold different ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.optim import Optimizer


def share_overflow(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, group: dist.ProcessGroup
) -> None:
    """Unscale the gradients, and let ``scaler.step`` skip this step on all ranks or on none.

    Each rank looks at its own parts alone. One that found an infinity would skip the step, the
    others would take it, and their parts of one weight would be of different steps.
    """
    scaler.unscale_(optimizer)
    # What unscale_ wrote and step() and update() read; there is no public name for it.
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for value in found.values():
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
