"""Clips the gradients of a step by the norm of all of them, however ranks divide the model.

Containers of :mod:`parallel.data` clip their own shards. Elsewhere gradients are whole, or
DTensors over the data ranks (``fully_shard``), and PyTorch knows their norm; over tensor-parallel
ranks the norms of the parts are added up, with those of what all ranks hold counted once::

    total = (sum over tp ranks of |parts|^2 + |wholes|^2)^(1/2)

The CS336 text's assignment 1, problem gradient_clipping, on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.strategies.strategy import Strategy
from parallel.tensor.plan import split_dim


def unscale_and_clip(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    max_norm: float,
    parallel: Strategy | None,
) -> Tensor:
    """Clip averages of gradients, without the scale of float16 ones; all ranks call it together.

    Args:
        model: as the strategy wrapped it.
        parallel: None for a whole model in one process.

    Returns:
        The norm of the whole model's gradients before, equal on all ranks.
    """
    scaler.unscale_(optimizer)
    if parallel is None or parallel.world_size == 1:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    of_container = getattr(model, "clip_grad_norm_", None)
    if of_container is None:
        return _clip(model, max_norm, parallel)
    norm: Tensor
    if parallel.tp == 1:
        norm = of_container(max_norm)
    else:
        group = parallel.tp_mesh().get_group()
        norm = of_container(max_norm, split_group=group, is_split=_is_split)
    return norm


def _clip(model: nn.Module, max_norm: float, parallel: Strategy) -> Tensor:
    """Clip gradients that are whole or DTensors over the data ranks, and may be split over tp."""
    parts: list[Tensor] = []
    wholes: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            splits = parallel.tp > 1 and _is_split(name.removeprefix("module."))
            (parts if splits else wholes).append(parameter.grad)
    total = _norm(wholes)
    if parallel.tp > 1:
        of_parts = _norm(parts).square()
        dist.all_reduce(of_parts, group=parallel.tp_mesh().get_group())
        total = (of_parts + total.square()).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total)
    return total


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm(gradients)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def _is_split(name: str) -> bool:
    return split_dim(name) is not None
