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


def _called(*names: str) -> set[Any]:
    """The operators of these names, as methods and as functions."""
    found = [getattr(home, name, None) for home in (Tensor, torch) for name in names]
    return {operator for operator in found if operator is not None}


_NORMS = {
    *_called("norm", "_foreach_norm"),
    *(torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm),
}
_REDUCTIONS = _called(
    *("sum", "nansum", "mean", "max", "amax", "min", "amin", "aminmax", "any", "all"),
    *("count_nonzero", "std", "var", "dot", "vdot", "inner"),
)
_STILL_PARTS = {
    Tensor.data.__get__,
    *_called("detach", "float", "double", "to", "cpu", "flatten", "view", "reshape"),
    *_called("abs", "square", "pow", "mul", "div", "isnan", "isinf", "isfinite", "ravel"),
    *(Tensor.__pow__, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__),
}
_UNSCALING = {torch._amp_foreach_non_finite_check_and_unscale_}


class PartOfGradient(Tensor):
    """This rank's part of a gradient: a tensor like others, but its norm is an error.

    ``torch.nn.utils.clip_grad_norm_`` would clip by the norm of this rank's parts, and by others
    on other ranks. So would a norm by hand, from a sum of squares, and a step would be skipped on
    some ranks by what is not finite there: sums and the like are errors too. Results of most
    operators are plain tensors.
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
        if func in _REDUCTIONS:
            raise RuntimeError(
                f"{func.__name__}() of this rank's part of a gradient is not the gradient's, and "
                "another one on each rank: for its norm, call the container's clip_grad_norm_(); "
                "for this rank's own, write grad.as_subclass(torch.Tensor)"
            )
        if func in _UNSCALING:
            raise RuntimeError(
                "GradScaler: an infinity may be in another rank's part of the gradients alone, and "
                "ranks would skip different steps: use parallel.data.AgreeingGradScaler"
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
