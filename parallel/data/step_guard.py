"""Refuses optimizer steps on gradients that ranks have not averaged.

Such a step would move each rank's replica by the gradients of its own batch, and no later error
would tell; nor of an optimizer that looks at whole matrices and has shards of them. PyTorch runs
the check before every step of every optimizer; it costs a look at each
container, and a look at each parameter only where a gradient is waiting to be averaged, or in an
optimizer's first step: from then on one over shards refuses to give a state dict of them alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallel.data.shards import origin_of_shard

WHOLE_PARAMETERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""PyTorch's optimizers that look at more than one element at a time."""

FAMILIES = ("dadapt", "galore", "lamb", "lars", "muon", "prodigy", "shampoo", "soap")
"""Words in the names of others that do, whatever a shard of a matrix would make of them."""


class Averaging(Protocol):
    """A container that averages gradients."""

    def name_of_unaveraged(self, parameters: Iterable[Tensor]) -> str | None:
        """The first of an optimizer's parameters whose gradient is not an average yet."""


_containers: weakref.WeakSet[Averaging] = weakref.WeakSet()

_num_groups_seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Parameter groups of each optimizer that has stepped, or whose state dict is whole."""


def guard_steps(container: Averaging) -> None:
    """Have optimizers refuse gradients of ``container`` before they are averages."""
    _register()
    _containers.add(container)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_require_averages)


def why_not_shards(kind: type[Optimizer]) -> str | None:
    """Why an optimizer cannot have shards of parameters; None if it can."""
    names = [base.__name__ for base in kind.__mro__]
    found = next((name for name in names if _is_of_whole_parameters(name)), None)
    return found and (
        f"{found} does not update each element by itself, and ranks hold parts of parameters "
        "here: use ShardedOptimizer with BucketedDDP, which leave parameters whole"
    )


def knows_shards(optimizer: Optimizer) -> None:
    """Say that the state dict of ``optimizer`` is that of whole parameters."""
    _num_groups_seen[optimizer] = sys.maxsize


def _refuse_states_of_shards(optimizer: Optimizer) -> None:
    """A file of one rank's state looks like one of the optimizer until all ranks load it."""
    groups = optimizer.param_groups
    seen = _num_groups_seen.get(optimizer, 0)
    if seen >= len(groups):
        return
    if any(_is_part(p) for group in groups[seen:] for p in group["params"]):
        optimizer.register_state_dict_pre_hook(_refuse_state)
        knows_shards(optimizer)
    else:
        _num_groups_seen[optimizer] = len(groups)


def _refuse_state(optimizer: Optimizer) -> NoReturn:
    raise RuntimeError(
        "state_dict() of the optimizer: its parameters are this rank's shards: make it by "
        f"parallel.data.optimizer_of_shards(params, {type(optimizer).__name__}, ...), whose "
        "state is whole, or save it by parallel.checkpoints.save_checkpoint"
    )


def _is_part(parameter: Tensor) -> bool:
    origin = origin_of_shard(parameter)
    return origin is not None and origin.is_part


def _is_of_whole_parameters(name: str) -> bool:
    return name in WHOLE_PARAMETERS or any(word in name.lower() for word in FAMILIES)


def _require_averages(optimizer: Optimizer, *_: Any) -> None:
    reason = why_not_shards(type(optimizer))
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    if reason is not None and any(map(_is_part, stepped)):
        raise RuntimeError(f"optimizer.step(): {reason}")
    _refuse_states_of_shards(optimizer)
    for container in tuple(_containers):
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        name = container.name_of_unaveraged(stepped)
        if name is not None:
            raise RuntimeError(
                f"optimizer.step(): the gradient of {name} is this rank's own: call the model's "
                "finish_gradient_synchronization() after backward, outside of no_sync()"
            )
