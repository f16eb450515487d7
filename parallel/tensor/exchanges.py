"""The three exchanges between tensor-parallel ranks, each with its gradient.

    forward                              backward
    gather_sequence   all-gather         reduce-scatter: each rank has a summand of the gradient
    scatter_sum       reduce-scatter     all-gather
    summed_gradient   nothing            all-reduce: each rank has seen its own tokens alone

DTensor's ``redistribute`` makes the same collectives from placements: Shard(1) to Replicate whose
gradient is Partial, Partial to Shard(1), and Replicate whose gradient is Partial. It derives them
anew in every call, which costs the host more than launching the collective.

The collectives are functional ones, which return their result. Those of torch.distributed write
it into a tensor that they are given: in the backward pass of a compiled autograd.Function torch
2.11 loses such writes, and the gradients of a compiled block came out wrong without an error.

Each is linear, and its gradient another of them, so that second derivatives are right too: of the
sum of what the ranks compute, as the first ones are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

# Renamed in torch 2.13, which warns of the names that older versions know alone.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens [B, S / tp, E] -> those of all ranks [B, S, E].

    Each rank then computes another part of the output, so that the gradients that come back are
    summands. Under autocast x is cast first, as matmuls would: half the bytes
    travel, and one copy is kept where each matmul would keep its own.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _GatherSequence.apply(x, mesh.get_group())


def scatter_sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Summands [B, S, E] on each rank -> this rank's tokens of the sum, [B, S / tp, E].

    Added in x's dtype.
    """
    return _ScatterSum.apply(x, mesh.get_group())


def summed_gradient(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    """A parameter that all ranks use, each on its own tokens; sums its gradient over the ranks.

    An operation of the graph and not a hook on the parameter, which containers that replace
    parameters would lose.
    """
    return _SummedGradient.apply(parameter, mesh.get_group())


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scatter = _ScatterSum.apply if _is_differentiated() else _scatter
        return scatter(gradient, ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gather = _GatherSequence.apply if _is_differentiated() else _gather
        return gather(gradient, ctx.group), None


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        add_up = _Sum.apply if _is_differentiated() else _sum
        return add_up(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Sum.apply(gradient, ctx.group), None


def _is_differentiated() -> bool:
    """Whether autograd records this backward pass; functional collectives have no derivative of
    their own in every version of torch."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, s, E] of each rank -> [B, S, E], in rank order; one sequence is not copied again."""
    by_rank = functional.wait_tensor(_all_gather(x.contiguous(), 0, group))
    return by_rank.unflatten(0, (group.size(), -1)).movedim(0, 1).flatten(1, 2)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, E] on each rank -> this rank's tokens [B, s, E] of their sum."""
    by_rank = x.unflatten(1, (group.size(), -1)).movedim(1, 0).flatten(0, 1).contiguous()
    return functional.wait_tensor(_reduce_scatter(by_rank, "sum", 0, group))
