"""Saves a checkpoint while training goes on, over ``torch.distributed.checkpoint.async_save``.

The state is copied to the CPU before the call returns, and a thread writes the copy. PyTorch's own
copies know no parts of tensors (:mod:`parallel.checkpoints.parts`), so they are made here. The
thread's messages travel in a group of their own on gloo: on the training's, those of one rank's
thread would meet those of another rank's training.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim import Optimizer

from parallel.checkpoints.folders import Folder, begin_saving
from parallel.checkpoints.parts import PartOfTensor, copy_of


def save_checkpoint_in_background(
    folder: Folder,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    writing_group: dist.ProcessGroup | None = None,
) -> Future[Any]:
    """:func:`parallel.checkpoints.save_checkpoint` that returns once the state is copied.

    All ranks call it together, between steps, and may train on at once. Each rank needs memory on
    the CPU for its own part. One checkpoint is written at a time: the next call waits for the last.

    Args:
        group: the ranks that train the model; the world if None.
        writing_group: the same ranks in a group on gloo that nothing else uses; made here if
            None, where they are the whole world.

    Returns:
        Its ``result()`` waits until the checkpoint is complete, and raises what went wrong; call it
        before the program ends or the folder is read.

    Raises:
        ValueError: the model is on other ranks, an older checkpoint in the folder cannot be
            removed, or there is no ``writing_group`` of a part of the world.
    """
    writing = _writer_of(group, writing_group)
    writing.wait()
    state = begin_saving(folder, model, optimizer, group)
    return writing.start(folder, state)


class _Writer:
    """The ranks that write checkpoints together, in a group of their own, one after another."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._last: Future[Any] | None = None

    def wait(self) -> None:
        """Until the last checkpoint is complete; what went wrong was its caller's to hear."""
        if self._last is not None:
            self._last.exception()
            self._last = None

    def start(self, folder: Folder, state: dict[str, Any]) -> Future[Any]:
        started = dcp.async_save(
            state,
            checkpoint_id=folder,
            process_group=self._group,
            async_stager=_Copies(),
            no_dist=self._group is None,
        )
        assert isinstance(started, Future), "copies are made at once"
        self._last = started
        return started


def _writer_of(group: dist.ProcessGroup | None, writing_group: dist.ProcessGroup | None) -> _Writer:
    if not dist.is_initialized():
        return _alone()
    if writing_group is not None:
        return _of_group(writing_group)
    if group is not None and group.size() < dist.get_world_size():
        # Ranks cannot make a group by themselves where they are in different numbers of groups.
        raise ValueError(
            f"group: has {group.size()} of the world's {dist.get_world_size()} ranks: give a "
            'second group of the same ranks as writing_group=, by dist.new_group(ranks, "gloo")'
        )
    return _of_world(id(dist.group.WORLD))


@cache
def _of_world(world: int) -> _Writer:
    return _Writer(dist.new_group(backend="gloo"))


@cache
def _of_group(group: dist.ProcessGroup) -> _Writer:
    return _Writer(group)


@cache
def _alone() -> _Writer:
    return _Writer(None)


class _Copies(AsyncStager):
    """Copies tensors to the CPU, parts as parts."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = _copy(state_dict)
        return copied


def _copy(value: Any) -> Any:
    if isinstance(value, PartOfTensor):
        return copy_of(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(item) for item in value)
    return value
