"""Saves and loads the state of a training in a folder, over torch.distributed.checkpoint."""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from parallel.checkpoints.parts import part_of
from parallel.checkpoints.state import (
    groups_of,
    model_state,
    names_of,
    origin_of,
    sharded_state_dict,
    ties_of,
)
from parallel.data.elementwise_optimizer import SCALARS

METADATA = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""

TIES = "tied_parameters"
"""The entry with the names of parameters that have several."""

GROUPS = "optimizer.param_groups"

Folder = str | os.PathLike[str]


def save_checkpoint(
    folder: Folder,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Every rank writes what it alone holds; of copies, one rank writes one.

    All ranks call it together, between steps, with a folder that all can reach. Of buffers, which
    are each rank's own, one rank's are kept.

    Args:
        group: the ranks that train the model; the world if None.

    Raises:
        ValueError: the model is on other ranks, or a rank cannot write into the folder.
    """
    state = begin_saving(folder, model, optimizer, group)
    try:
        with _quietly():
            dcp.save(
                state, checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized()
            )
    except CheckpointException as error:
        # An interruption goes on as it is, so that nobody takes it for an error and goes on.
        if not isinstance(_first_of(error), Exception):
            raise
        raise ValueError(f"{folder}: cannot be written: {_in_one_line(error)}") from None


def begin_saving(
    folder: Folder, model: nn.Module, optimizer: Optimizer | None, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """What is to be saved, in the training's own memory; the folder holds no checkpoint now."""
    _require_all_ranks(model, group)
    # What an interrupted save leaves of an older one is no checkpoint: no rank writes before this.
    _remove_metadata(folder, model, group)
    return {**sharded_state_dict(model, optimizer), TIES: ties_of(model)}


def _remove_metadata(folder: Folder, model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """One rank removes it, and all hear whether it could: those that wait for it would hang."""
    path = Path(folder) / METADATA
    code = 0
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            code = error.errno or errno.EIO
    if dist.is_initialized():
        device = next((parameter.device for parameter in model.parameters()), None)
        told = torch.tensor(code, device=device)
        dist.broadcast(told, group=group, group_src=0)
        code = int(told)
    if code:
        raise ValueError(f"{folder}: cannot be written: {path}: {os.strerror(code)}")


def load_checkpoint(
    folder: Folder,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Every rank reads its own part of a checkpoint that any number of ranks saved.

    The container may be another one, the optimizer's parameter groups are the same; one that has
    not stepped receives its state. A checkpoint is pickled data: load those that you trust.

    Raises:
        ValueError: there is no checkpoint, or it is of another model, optimizer or other parameter
            groups, and nothing has changed; or a file of it is missing or cut short.
    """
    _require_all_ranks(model, group)
    saved = _saved(folder)
    state: dict[str, Any] = {"model": _found_in(saved, model_state(model), folder)}
    if optimizer is not None and GROUPS not in saved:
        raise ValueError(f"{folder}: has no optimizer; load the model alone")
    options: dict[str, Any] = {TIES: ()} if TIES in saved else {}
    if optimizer is not None:
        options["optimizer"] = {"param_groups": ()}
    if options:
        _read(folder, options, group)
    if TIES in options:
        _require_ties(options[TIES], model, folder)
    if optimizer is not None:
        _require_groups(options["optimizer"]["param_groups"], optimizer, model, folder)
        state["optimizer"] = {"state": _empty_state(saved, model, optimizer)}
    _read(folder, state, group)
    changed = getattr(model, "shards_have_changed", None)
    if changed is not None:
        changed()
    if optimizer is not None:
        _give(optimizer, {**options["optimizer"], **state["optimizer"]}, model)


def _require_all_ranks(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    num_ranks = getattr(model, "world_size", None)
    if num_ranks is None or not dist.is_initialized():
        return
    called = dist.get_world_size(group)
    if called != num_ranks:
        raise ValueError(
            f"the model is trained by {num_ranks} ranks and the checkpoint is of {called}: give "
            "group=, and parts of a tensor-parallel model a folder each"
        )


def _saved(folder: Folder) -> dict[str, Any]:
    """What a checkpoint holds, by name."""
    try:
        found: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except (FileNotFoundError, EOFError, pickle.UnpicklingError):
        raise ValueError(f"{folder}: holds no checkpoint, or one that is not complete") from None
    return found


def _read(folder: Folder, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Read into ``state``, in place."""
    try:
        with _quietly():
            dcp.load(
                state,
                checkpoint_id=folder,
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except (CheckpointException, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder}: a file of it cannot be read: {_in_one_line(error)}") from None


def _first_of(error: BaseException) -> BaseException:
    """Of the errors that ranks had, the first one's; else the error itself."""
    failures: dict[int, Any] = getattr(error, "failures", None) or {0: (error,)}
    first: BaseException = next(iter(failures.values()))[0]
    return first


def _in_one_line(error: BaseException) -> str:
    first = _first_of(error)
    return next(iter(str(first).splitlines()), type(first).__name__)


def _require_ties(saved: tuple[tuple[str, ...], ...], model: nn.Module, folder: Folder) -> None:
    """Two tensors of a checkpoint do not become one."""
    for names in ties_of(model):
        if not any(set(names) <= set(tied) for tied in saved):
            raise ValueError(
                f"{folder}: has {' and '.join(names)} apart, which are one parameter in the model"
            )


def _require_groups(
    saved: tuple[dict[str, Any], ...], optimizer: Optimizer, model: nn.Module, folder: Folder
) -> None:
    """The groups are of the same parameters, and have the options of the same optimizer."""
    mine = groups_of(optimizer, names_of(model))
    names, wanted = ([group["params"] for group in groups] for groups in (saved, mine))
    if names != wanted:
        raise ValueError(
            f"{folder}: its parameter groups are of {[len(members) for members in names]} "
            f"parameters, and the optimizer's of {[len(members) for members in wanted]}, or of "
            "others"
        )
    for group, own in zip(saved, mine, strict=True):
        # One version of an optimizer may have an option that another has not; schedulers add one.
        missing, strange = own.keys() - group.keys(), group.keys() - own.keys() - {"initial_lr"}
        if missing and strange:
            raise ValueError(
                f"{folder}: is of another optimizer than {type(optimizer).__name__}: its groups "
                f"have {', '.join(sorted(strange))}, and no {', '.join(sorted(missing))}"
            )


def _found_in(saved: dict[str, Any], state: dict[str, Tensor], folder: Folder) -> dict[str, Tensor]:
    for saved_name in saved:
        kind, _, name = saved_name.partition(".")
        if kind == "model" and name not in state:
            raise ValueError(
                f"{folder}: has {name}, which the model has not; load it into the same"
            )
    for name, value in state.items():
        entry = saved.get(f"model.{name}")
        if entry is None:
            raise ValueError(f"{folder}: has no {name}; load it into the same model")
        if entry.size != value.size():
            raise ValueError(
                f"{folder}: {name} has shape {tuple(entry.size)}, and {tuple(value.size())} in "
                "the model"
            )
    return state


def _empty_state(
    saved: dict[str, Any], model: nn.Module, optimizer: Optimizer
) -> dict[str, dict[str, Any]]:
    """Memory for this rank's part of the optimizer's state, of the shapes that were saved."""
    names = names_of(model)
    owns = getattr(optimizer, "owns", lambda parameter: True)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if owns(p)]
    mine = {names[parameter]: parameter for parameter in parameters}
    found: dict[str, dict[str, Any]] = {}
    for entry, description in saved.items():
        name, _, key = entry.removeprefix("optimizer.state.").rpartition(".")
        if not entry.startswith("optimizer.state.") or name not in mine:
            continue
        parameter = mine[name]
        value: Any = None
        if isinstance(description, TensorStorageMetadata):
            origin = origin_of(parameter, model)
            whole = parameter.shape if origin is None else origin.shape
            dtype = description.properties.dtype
            if description.size == whole and key not in SCALARS:
                value = torch.zeros_like(parameter.detach(), dtype=dtype)
                value = value if origin is None else part_of(value, origin)
            else:
                value = torch.zeros(description.size, dtype=dtype)
        found.setdefault(name, {})[key] = value
    return found


def _give(optimizer: Optimizer, loaded: dict[str, Any], model: nn.Module) -> None:
    """Hand the loaded state to the optimizer, whose state dicts number parameters."""
    groups = loaded["param_groups"]
    names = [group["params"] for group in groups]
    numbers = {name: n for n, name in enumerate(name for members in names for name in members)}
    state = {
        numbers[name]: {key: _plain(value) for key, value in values.items()}
        for name, values in loaded["state"].items()
    }
    optimizer.load_state_dict(
        {
            "state": state,
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
            ],
        }
    )


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Tensor) else value


@contextmanager
def _quietly() -> Iterator[None]:
    """One process need not be told that it is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
