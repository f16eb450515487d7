"""Containers that keep the replicas of a module equal: four ways to average gradients.

    naive        one all-reduce a parameter, after the backward pass
    flat         one all-reduce for all parameters, after the backward pass
    overlapped   one all-reduce a parameter, as soon as its gradient is there
    bucketed     one all-reduce a bucket of parameters, as soon as its gradients are there

All are used alike, on any module, with or without the rest of this project::

    model = BucketedDDP(module, bucket_size_mb=25)
    loss_of(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.flat import Averaging
from parallel.data.gradients import Averaged, OneGradient, buckets_of

MIB = 2**20


class DataParallel(nn.Module):
    """What all containers share: equal replicas at the start, and average gradients later.

    Which parameters train is read here, once: those that ``requires_grad``, each counted once
    however many modules share it. Buffers are broadcast here too, and then are each rank's own.

    A parameter that no rank used in a step keeps ``grad=None``, so that optimizers pass it over
    as they do in one process; one that some ranks used has the mean over all of them.

    Args:
        module: on its device already; may have parameters of several dtypes.
        overlap: start averaging during the backward pass.
        group: the ranks to average over, all of which make the container together; the world
            if None, and one rank where there is no process group.

    Raises:
        ValueError: nothing in the module trains, or it lies on several devices.
    """

    def __init__(
        self, module: nn.Module, *, overlap: bool, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        require_one_device(module)
        self.module = module
        self._group = dist.group.WORLD if group is None and dist.is_initialized() else group
        self._trained = [p for p in module.parameters() if p.requires_grad]
        if not self._trained:
            raise ValueError(
                "the module has no parameter that requires gradients: there is nothing to average"
            )
        # The last layers' gradients are there first.
        self._trained.reverse()
        self._synchronizes = True
        self._averaged: Sequence[Averaged] = ()
        self._progress = _Progress(())
        self._averaging: Averaging | None = None
        if not self._has_work():
            return
        if self._group is not None and self.world_size > 1:
            broadcast_from_first(module, self._group)
            self._averaging = Averaging(self._group)
        self._averaged = self._arrange(self._trained)
        self._progress = _Progress(self._averaged)
        self._used = torch.ones(
            len(self._trained), dtype=torch.uint8, device=self._trained[0].device
        )
        if overlap:
            self._register_hooks()

    @property
    def world_size(self) -> int:
        return 1 if self._group is None else self._group.size()

    def _has_work(self) -> bool:
        """Whether the module does not train by itself as it is."""
        return self.world_size > 1

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[Averaged]:
        """What travels together, in the order in which gradients are about to be there."""
        raise NotImplementedError

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to each rank's own gradients; the next one averages all."""
        before = self._synchronizes
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = before

    def finish_gradient_synchronization(self) -> None:
        """Gradients are averages over all ranks from here on; called after every backward pass.

        On a GPU the host does not wait, but what it launches next does.
        """
        if not self._averaged or not self._synchronizes:
            return
        self._start_up_to(len(self._averaged))
        unused = self._unused()
        work = self._start_telling_used([number for number, *_ in unused])
        for item in self._averaged:
            item.wait()
        if work is not None:
            work.wait()
        if unused and work is not None:
            # Read only where something is missing: on a GPU reading waits for the device.
            used = self._used.tolist()
            for number, item, place in unused:
                if used[number]:
                    item.give(place)
        self._progress.start_over()

    def _unused(self) -> list[tuple[int, Averaged, int]]:
        """Parameters without a gradient here: their number, and where they travel."""
        found, first = [], 0
        for item in self._averaged:
            found += [(first + place, item, place) for place in item.absent]
            first += len(item.parameters)
        return found

    def _start_telling_used(self, unused: list[int]) -> dist.Work | None:
        """Begin to learn which parameters any rank has a gradient of.

        A byte a parameter. Always, since a rank that misses nothing cannot know of the others.
        """
        if self.world_size == 1:
            return None
        self._used.fill_(1)
        if unused:
            self._used[torch.tensor(unused, device=self._used.device)] = 0
        return dist.all_reduce(self._used, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _register_hooks(self) -> None:
        """Have autograd tell when each gradient is complete."""
        # Parameters outlive the container where the caller keeps the module.
        this = weakref.ref(self)
        for index, item in enumerate(self._averaged):

            def complete(parameter: Tensor, index: int = index) -> None:
                container = this()
                if container is not None and container._synchronizes:
                    container._complete(index)

            for parameter in item.parameters:
                parameter.register_post_accumulate_grad_hook(complete)

    def _complete(self, index: int) -> None:
        """One gradient of number ``index`` is there: start what can be started.

        In one order on all ranks, whatever order gradients come in: ranks that used different
        parameters would else pair all-reduces of different ones.
        """
        progress = self._progress
        if progress.missing[index] == 0:
            raise RuntimeError(
                "a gradient came again before finish_gradient_synchronization(): call that after "
                "every backward pass, or run all passes but the last in no_sync()"
            )
        progress.missing[index] -= 1
        number = progress.num_started
        while number < len(progress.missing) and not progress.missing[number]:
            number += 1
        self._start_up_to(number)

    def _start_up_to(self, number: int) -> None:
        """Start what comes before ``number`` and has not been started."""
        progress = self._progress
        while progress.num_started < number:
            self._averaged[progress.num_started].start(self._averaging)
            progress.num_started += 1


class _Progress:
    """How far a backward pass has come. Not attributes of a module, which are slow to set."""

    __slots__ = ("_sizes", "missing", "num_started")

    def __init__(self, averaged: Sequence[Averaged]) -> None:
        self._sizes = [len(item.parameters) for item in averaged]
        self.start_over()

    def start_over(self) -> None:
        self.num_started = 0
        """Of the averages."""
        self.missing = list(self._sizes)
        """Gradients of each average that have not come."""


class NaiveDDP(DataParallel):
    """One all-reduce a parameter, after the backward pass (problem naive_ddp)."""

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, overlap=False, group=group)

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[Averaged]:
        return [OneGradient(parameter) for parameter in parameters]


class FlatDDP(DataParallel):
    """One all-reduce for all gradients of a dtype, after the backward pass.

    Problem minimal_ddp_flat_benchmarking.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, overlap=False, group=group)

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[Averaged]:
        return buckets_of(parameters)


class OverlappedDDP(DataParallel):
    """One all-reduce a parameter, while the backward pass goes on.

    Problem ddp_overlap_individual_parameters.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, overlap=True, group=group)

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[Averaged]:
        return [OneGradient(parameter) for parameter in parameters]


class BucketedDDP(DataParallel):
    """One all-reduce a bucket, while the backward pass goes on (section 2.3.3).

    Buckets hold parameters in reverse order and at most ``bucket_size_mb`` MiB of them, or one
    that is larger than that.

    Raises:
        ValueError: ``bucket_size_mb`` is not positive, or as :class:`DataParallel` says.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float = 25.0,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 < bucket_size_mb < math.inf:
            raise ValueError(f"bucket_size_mb={bucket_size_mb:g}: must be positive and finite")
        self._max_bytes = bucket_size_mb * MIB
        super().__init__(module, overlap=True, group=group)

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[Averaged]:
        return buckets_of(parameters, self._max_bytes)


def require_one_device(module: nn.Module) -> None:
    """Raise ValueError that names the first parameter or buffer on a device of its own."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if first is None:
            first = name, tensor.device
        if tensor.device != first[1]:
            raise ValueError(
                f"{name} is on {tensor.device} and {first[0]} on {first[1]}: move the whole module "
                "to the device of this rank"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: give the module memory first")


def broadcast_from_first(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give all ranks the parameters and buffers of the group's first."""
    for tensor in (*module.parameters(), *module.buffers()):
        values = tensor.detach()
        sent = values.contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        if sent is not values:
            values.copy_(sent)
