"""The state of a model and its optimizer by name, with this rank's parts of tensors."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.checkpoints.parts import part_of
from parallel.data.shards import ShardOrigin


def sharded_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """What this rank holds, for ``torch.distributed.checkpoint.save``; nothing is gathered.

    ``torch.distributed.checkpoint.load`` into it reads tensors in place. ``param_groups`` are then
    values in the dictionary alone, and a new optimizer's state is not in it: ``load_checkpoint``
    hands both to the optimizer.

    Args:
        model: a container, or any module; names are those of the module inside.
        optimizer: over the parameters of the model, :class:`ShardedOptimizer` among others.

    Returns:
        ``{"model": {name: tensor}, "optimizer": {"state": {name: {key: value}}, "param_groups"}}``;
        tensors share memory with the model's and the optimizer's.
    """
    state: dict[str, Any] = {"model": model_state(model)}
    if optimizer is not None:
        names = names_of(model)
        state["optimizer"] = {
            "state": {
                names[parameter]: {
                    key: _part(value, parameter, model) for key, value in values.items()
                }
                for parameter, values in optimizer.state.items()
            },
            "param_groups": groups_of(optimizer, names),
        }
    return state


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, under all their names, and buffers; parts where this rank holds parts."""
    inner = getattr(model, "module", model)
    wait = getattr(model, "wait_for_gathering", None)
    if wait is not None:
        wait()
    with getattr(model, "reading_module", contextlib.nullcontext)():
        state = {n: value for n, value in inner.state_dict().items() if isinstance(value, Tensor)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        origin = origin_of(parameter, model)
        values = parameter.detach() if origin is None else part_of(parameter, origin)
        state[name.removeprefix("module.") if inner is not model else name] = values
    return state


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter that an optimizer may have: shards, and the module's own."""
    inner = getattr(model, "module", model)
    found = {p: name for name, p in inner.named_parameters()}
    for name, parameter in model.named_parameters():
        found[parameter] = name.removeprefix("module.") if inner is not model else name
    return found


def ties_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that has several."""
    inner = getattr(model, "module", model)
    found: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = name.removeprefix("module.") if inner is not model else name
        found.setdefault(parameter, []).append(plain)
    return tuple(tuple(sorted(names)) for names in found.values() if len(names) > 1)


def groups_of(optimizer: Optimizer, names: dict[Tensor, str]) -> tuple[dict[str, Any], ...]:
    """Options of the parameter groups, with names in place of parameters.

    In a tuple, which checkpoints keep as one value.
    """
    return tuple(
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    )


def origin_of(parameter: Tensor, model: nn.Module) -> ShardOrigin | None:
    """Where the elements of a shard belong; None for a parameter that is whole."""
    shards = getattr(model, "shards", {})
    return getattr(shards.get(parameter, parameter), "origin", None)


def _part(value: Any, parameter: Tensor, model: nn.Module) -> Any:
    origin = origin_of(parameter, model)
    if isinstance(value, Tensor) and origin is not None and value.shape == parameter.shape:
        return part_of(value, origin)
    return value
