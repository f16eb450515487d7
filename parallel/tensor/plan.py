"""The style of each module of the transformer, and the model that is split by them.

In the order of the forward pass; [] are a rank's shapes, E d_model, and tp divides heads H,
key heads G, d_ff F and the vocabulary V::

    embedding            rows of the vocabulary   -> [B, S / tp, E]   reduce-scatter
    each block:
      attention_norm     this rank's tokens          [B, S / tp, E]
      attention          all tokens               -> [B, S, E]        all-gather
        q, k, v_proj     by heads                    [B, S, (H or G) / tp D]
        sinks            by heads                    [H / tp], if there are any
        o_proj           by heads                 -> [B, S / tp, E]   reduce-scatter
      feed_forward_norm  this rank's tokens          [B, S / tp, E]
      feed_forward       all tokens               -> [B, S, E]        all-gather
        w1, w3           columns                     [B, S, F / tp]
        w2               rows                     -> [B, S / tp, E]   reduce-scatter
    final_norm           this rank's tokens          [B, S / tp, E]
    head                 all tokens, columns      -> [B, S, V / tp]   all-gather

The backward pass has an all-gather for each reduce-scatter and the other way round, and an
all-reduce for the weight of each norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from parallel.tensor.styles import (
    ColumnParallel,
    GatheredColumnParallel,
    GatherInput,
    ParallelHeads,
    RowParallel,
    SequenceParallelNorm,
    Style,
    VocabParallelEmbedding,
)

PLAN: dict[str, Style] = {
    "embedding": VocabParallelEmbedding(),
    "blocks.*.attention_norm": SequenceParallelNorm(),
    "blocks.*.attention": ParallelHeads(),
    "blocks.*.attention.[qkv]_proj": ColumnParallel(),
    "blocks.*.attention.o_proj": RowParallel(),
    "blocks.*.feed_forward_norm": SequenceParallelNorm(),
    "blocks.*.feed_forward": GatherInput(),
    "blocks.*.feed_forward.w[13]": ColumnParallel(),
    "blocks.*.feed_forward.w2": RowParallel(),
    "final_norm": SequenceParallelNorm(),
    "head": GatheredColumnParallel(),
}
"""Styles by patterns of module names (:mod:`fnmatch`)."""


def split_transformer(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Replace the transformer's weights, in place, by this rank's shards, on ``device``.

    Parameters on the meta device are initialised here, in the order in which the model's
    constructor would have: one seed gives one model on any number of ranks. Each weight is
    whole on every device for a moment, never the model, which may fit on none.

    Args:
        mesh: of one axis, the ranks that share every weight.

    Raises:
        ValueError: a weight does not divide by the ranks.
    """
    for name, module in model.named_modules():
        _initialise(module, device)
        style = style_of(name)
        if style is not None:
            parallelize_module(module, mesh, style)


def style_of(module_name: str) -> Style | None:
    """The style of a module of the transformer; None for one that only holds others."""
    found = [style for pattern, style in PLAN.items() if fnmatchcase(module_name, pattern)]
    assert len(found) <= 1, f"{module_name} has one place in the plan"
    return found[0] if found else None


def split_dim(parameter_name: str) -> int | None:
    """The dimension that a parameter is split along; None where all ranks hold it whole."""
    module_name, _, name = parameter_name.rpartition(".")
    style = style_of(module_name)
    return None if style is None else style.split_dims.get(name)


def whole_parameters(
    named_parameters: Iterable[tuple[str, Tensor]], mesh: DeviceMesh
) -> dict[str, Tensor]:
    """Every parameter as one process would have it, by name; all ranks call it together."""
    found = {}
    for name, parameter in named_parameters:
        own, dim = parameter.detach(), split_dim(name)
        if dim is not None:
            parts = [torch.empty_like(own) for _ in range(mesh.size())]
            dist.all_gather(parts, own.contiguous(), group=mesh.get_group())
            own = torch.cat(parts, dim)
        found[name] = own
    return found


def gradient_norm(named_parameters: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> Tensor:
    """The 2-norm of all gradients of the whole model, as float32; all ranks call it together.

    Shards are summed over ranks, and gradients that all ranks hold count once. They have been
    averaged over the data ranks before.
    """
    of_parts = torch.zeros((), device=mesh.device_type)
    of_wholes = torch.zeros((), device=mesh.device_type)
    for name, parameter in named_parameters:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            total = of_wholes if split_dim(name) is None else of_parts
            total += norm.square()
    dist.all_reduce(of_parts, group=mesh.get_group())
    return (of_parts + of_wholes).sqrt()


def _initialise(module: nn.Module, device: torch.device) -> None:
    """Allocate and initialise a module's own parameters that are on the meta device."""
    own = list(module.parameters(recurse=False))
    if any(parameter.is_meta for parameter in own):
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()
