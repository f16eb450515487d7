"""Gradient clipping by the norm of all gradients of a model, where ranks hold parts of them.

    total = (sum of |g|^p over all elements)^(1/p),    g <- g min(1, max_norm / (total + 1e-6))

Every rank adds up |g|^p of its own parts, parameter by parameter, and one all-reduce of a number
a parameter makes the sums whole. What all ranks hold counts once. The norm of the whole is then
that of the parameters' norms, as PyTorch's ``clip_grad_norm_`` computes it (Pascanu et al., "On
the difficulty of training recurrent neural networks", 2013, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_NORMS = {
    *(torch.Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm),
    *(torch._foreach_norm, torch.linalg.matrix_norm),
}
_STILL_PARTS = {
    *(torch.Tensor.detach, torch.Tensor.data.__get__, torch.Tensor.float, torch.Tensor.double),
    *(torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.flatten, torch.flatten, torch.Tensor.view),
}


class PartOfGradient(Tensor):
    """This rank's part of a gradient: a tensor like others, but its norm is an error.

    ``torch.nn.utils.clip_grad_norm_`` would clip by the norm of this rank's parts, and by others
    on other ranks. Results of operators are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            raise RuntimeError(
                "the norm of this rank's part of a gradient is not the gradient's: write "
                "model.clip_grad_norm_(max_norm) with the container in place of "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _STILL_PARTS else result


@dataclass(kw_only=True, slots=True, frozen=True)
class Clipped:
    """A parameter whose gradient is clipped, and which ranks hold the rest of it."""

    parameter: nn.Parameter
    is_part: bool
    """Whether each of the container's ranks holds other elements; else all hold the same."""
    is_split: bool
    """The same for the ranks that split the model: tensor-parallel ones."""


def clip_by_global_norm(
    clipped: Sequence[Clipped],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    group: dist.ProcessGroup | None,
    split_group: dist.ProcessGroup | None,
) -> Tensor:
    """Scale gradients in place so that the norm of all together is at most ``max_norm``.

    All ranks call it together, with the same parameters; one without a gradient counts as zeros.

    Returns:
        The norm before, float32, or float64 where all gradients are; equal on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is infinite or not a number, and ``error_if_nonfinite``.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type:g}: must be positive, or inf")
    gradients = [c.parameter.grad for c in clipped]
    plain = [None if g is None else g.as_subclass(Tensor) for g in gradients]
    with torch.no_grad():
        device = clipped[0].parameter.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        powers = torch.stack([zero if g is None else _power(g, norm_type) for g in plain])
        powers = _over(group, powers, [c.is_part for c in clipped], norm_type)
        powers = _over(split_group, powers, [c.is_split for c in clipped], norm_type)
        norms = powers if norm_type == math.inf else powers ** (1 / norm_type)
        there = [g for g in plain if g is not None]
        exact = bool(there) and all(g.dtype == torch.float64 for g in there)
        total = torch.linalg.vector_norm(norms if exact else norms.float(), norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_(): the gradients' norm is {float(total)}; pass "
                "error_if_nonfinite=False to scale by it all the same"
            )
        if there:
            torch._foreach_mul_(there, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _power(gradient: Tensor, norm_type: float) -> Tensor:
    """The sum of |g|^p as float64, or the largest |g|."""
    if gradient.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=gradient.device)
    if norm_type == 2 and gradient.dtype in (torch.float32, torch.float64):
        # No root that would have to be squared again: exact where the sum of squares is.
        flat = gradient.as_strided((gradient.numel(),), (1,)) if _is_dense(gradient) else gradient
        flat = flat.reshape(-1)
        return torch.dot(flat, flat).double()
    wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(gradient, norm_type, dtype=wide).double()
    return norm if norm_type in (1, math.inf) else norm**norm_type


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _over(
    group: dist.ProcessGroup | None, powers: Tensor, differs: Sequence[bool], norm_type: float
) -> Tensor:
    """Join the values of the ranks in ``group``; where they are copies, the first's count."""
    if group is None or group.size() == 1 or not any(differs):
        return powers
    if dist.get_rank(group) > 0 and not all(differs):
        counted = torch.tensor(differs, device=powers.device)
        powers = powers.where(counted, 0.0)
    operation = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
    dist.all_reduce(powers, operation, group=group)
    return powers
