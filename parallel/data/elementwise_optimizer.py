"""Optimizers over shards of parameters, whose state dicts are those of whole parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from parallel.data.shards import ShardOrigin, origin_of_shard
from parallel.data.step_guard import knows_shards, why_not_shards

SCALARS = ("step", "mu_product", "eta", "mu")
"""State of PyTorch's optimizers that is one number of a whole parameter, on every rank."""


def optimizer_of_shards(
    params: Iterable[Any], optimizer_cls: type[Optimizer], **kwargs: Any
) -> Optimizer:
    """An ``optimizer_cls`` over shards of parameters, such as ``container.parameters()``.

    ``state_dict`` is that of the optimizer over whole parameters, on the CPU: all ranks call it
    together and each receives it whole. ``load_state_dict`` takes it on any number of ranks, and
    so does ``optimizer_cls`` itself on one.

    Raises:
        ValueError: the optimizer needs whole parameters, or there are none.
    """
    reason = why_not_shards(optimizer_cls)
    if reason is not None:
        raise ValueError(reason)
    optimizer = optimizer_cls(params, **kwargs)
    optimizer.register_state_dict_post_hook(_join_state)
    optimizer.register_load_state_dict_pre_hook(_cut_state)
    knows_shards(optimizer)
    return optimizer


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, in the order in which state dicts number them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _join_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state of whole parameters, joined from all ranks' shards."""
    parameters = _parameters(optimizer)
    origins = {n: o for n, p in enumerate(parameters) if (o := origin_of_shard(p)) is not None}
    own = {
        number: {name: _on_cpu(value) for name, value in state.items()}
        for number, state in state_dict["state"].items()
        if number in origins
    }
    by_rank: list[Any] = [own]
    group = next((origin.group for origin in origins.values()), None)
    if group is not None and group.size() > 1:
        by_rank = [None] * group.size()
        dist.all_gather_object(by_rank, own, group=group)
    joined = dict(state_dict["state"])
    for number, state in own.items():
        shape = (origins[number].stop - origins[number].start,)
        joined[number] = {
            name: origins[number].join([states[number][name] for states in by_rank])
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for name, value in state.items()
        }
    return {**state_dict, "state": joined}


def _cut_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's shards of the state of whole parameters."""
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = _parameters(optimizer)
    if len(saved) != len(parameters):
        # The optimizer says so itself.
        return None
    state = dict(state_dict["state"])
    for number, parameter in zip(saved, parameters, strict=True):
        origin = origin_of_shard(parameter)
        if origin is not None and number in state:
            state[number] = {
                name: _cut(name, value, origin) for name, value in state[number].items()
            }
    return {**state_dict, "state": state}


def _cut(name: str, value: Any, origin: ShardOrigin) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name not in SCALARS and value.shape == origin.shape:
        return origin.cut(value)
    # A copy: two optimizers that load one state must not count their steps in one tensor.
    return value.clone()


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
