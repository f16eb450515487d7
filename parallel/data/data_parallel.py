"""The base of all containers: averages gradients over the ranks that hold one model.

Containers differ in their transfers (which gradients travel together) and in when these start.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.clipping import Clipped, clip_by_global_norm
from parallel.data.gradients import Averager, GradientTransfer
from parallel.data.hybrid_sharding import HybridAverager
from parallel.data.replicas import (
    broadcast_from_first,
    has_memory,
    registrations,
    require_one_device,
)
from parallel.data.step_guard import guard_steps


class DataParallel(nn.Module):
    """Base of all containers: makes replicas equal at the start, and averages gradients later.

    The constructor notes the parameters that require gradients, each once however many modules
    share it. It broadcasts buffers too, which from then on are each rank's own.

    A parameter that no rank used in a step keeps ``grad=None``, so that optimizers pass it over
    as they do in one process; one that some ranks used has the mean over all of them.

    Args:
        module: on its device already; may have parameters of several dtypes.
        overlap: start averaging during the backward pass.
        group: the ranks to average over, all of which make the container together; the world
            if None, and one rank where there is no process group.
        replicas: the ranks with this rank's number in other groups, to average over as well.

    Raises:
        ValueError: nothing in the module trains, or it lies on several devices.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        overlap: bool,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        _require_unwrapped(module)
        require_one_device(module)
        self.module = module
        self._group = dist.group.WORLD if group is None and dist.is_initialized() else group
        self._replicas = replicas
        self._trained = [p for p in module.parameters() if p.requires_grad]
        if not self._trained:
            raise ValueError(
                "the module has no parameter that requires gradients: there is nothing to average"
            )
        # The last layers' gradients are there first.
        self._trained.reverse()
        self._frozen: list[nn.Parameter] = []
        """Parameters that have never trained."""
        self._index_of: dict[Tensor, int] = {}
        """The transfer of each trained parameter."""
        self._synchronizes, self._overlaps = True, overlap
        self._own_gradients = bytearray(len(self._trained))
        """1 for each trained parameter with a gradient that has not been averaged."""
        self._transfers: Sequence[GradientTransfer] = ()
        self._progress = _Progress(())
        self._averager: Averager | None = None
        if not self._has_work():
            return
        if self._group is not None and self.world_size > 1:
            self._broadcast((*module.parameters(), *module.buffers()))
            self._averager = (
                Averager(self._group)
                if self._replicas is None
                else HybridAverager(self._group, self._replicas)
            )
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._transfers = self._arrange(self._trained)
        self._prepare(self._trained)
        self._registrations = registrations().count
        guard_steps(self)

    @property
    def world_size(self) -> int:
        """Ranks that train the model together."""
        groups = [group for group in (self._group, self._replicas) if group is not None]
        return math.prod(group.size() for group in groups)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.world_size > 1:
            # For copy.deepcopy() and pickle alike, which would stop at the process group.
            raise TypeError(
                f"{type(self).__name__} cannot be copied or pickled: its process group cannot; "
                "copy the module before it is wrapped, and average named_parameters(), or save "
                "state_dict()"
            )
        return super().__reduce_ex__(protocol)

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the values of the first; what has no memory yet is passed over."""
        there = [tensor for tensor in tensors if has_memory(tensor)]
        for group in (self._replicas, self._group):
            if group is not None:
                broadcast_from_first(there, group)

    def _has_work(self) -> bool:
        """Whether training the module needs more than the module itself."""
        return self.world_size > 1

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        """The transfers, in the order in which the backward pass completes their gradients."""
        raise NotImplementedError

    def _arrange_more(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        """All transfers, once ``parameters`` have begun to train too."""
        return [*self._transfers, *self._arrange(parameters)]

    def _prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        """Get ready for gradients of ``parameters``, which train from now on."""
        transfers = self._transfers
        self._index_of = {p: n for n, transfer in enumerate(transfers) for p in transfer.parameters}
        trained = set(self._trained)
        self._progress = _Progress(
            [sum(p in trained for p in transfer.parameters) for transfer in transfers]
        )
        num_parameters = sum(len(transfer.parameters) for transfer in transfers)
        self._used = torch.ones(num_parameters, dtype=torch.uint8, device=self._trained[0].device)
        self._register_hooks(parameters)

    def _take_in_thawed(self) -> None:
        """Train parameters that were frozen until now, as layers are in gradual unfreezing.

        All ranks thaw the same ones between the same passes.
        """
        thawed = [p for p in self._frozen if p.requires_grad]
        if not thawed:
            return
        if self._progress.has_begun:
            names = {p: name for name, p in self.module.named_parameters()}
            raise RuntimeError(
                f"{names[thawed[0]]} trains since the last backward pass, whose gradients are not "
                "averaged yet: call finish_gradient_synchronization() before requires_grad_()"
            )
        self._frozen = [p for p in self._frozen if not p.requires_grad]
        thawed.reverse()
        self._trained += thawed
        self._own_gradients += bytes(len(thawed))
        self._transfers = self._arrange_more(thawed)
        self._prepare(thawed)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._take_in_thawed()
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to each rank's own gradients; the next pass averages all."""
        before = self._synchronizes
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = before

    def finish_gradient_synchronization(self) -> None:
        """Complete the averages of all gradients; called after every backward pass.

        On a GPU the stream waits, and not the host.
        """
        if not self._transfers or not self._synchronizes:
            return
        self._require_known_parameters()
        # Where the module was called in place of the container.
        self._take_in_thawed()
        self._start_up_to(len(self._transfers))
        unused = self._unused()
        work = self._start_exchanging_used([number for number, *_ in unused])
        for transfer in self._transfers:
            transfer.wait()
        if work is not None:
            work.wait()
        if unused and work is not None:
            # Read only where something is missing: on a GPU reading waits for the device.
            used = self._used.tolist()
            for number, transfer, place in unused:
                if used[number]:
                    transfer.give(place)
        self._progress.start_over()
        self._own_gradients = bytearray(len(self._trained))

    def _require_known_parameters(self) -> None:
        """Raise RuntimeError where the module has parameters that came after wrapping."""
        if self._registrations == registrations().count:
            return
        self._registrations = registrations().count
        known = {*self._trained, *self._frozen}
        for name, parameter in self.module.named_parameters():
            if parameter not in known:
                self._registrations = -1
                raise RuntimeError(
                    f"{name} has come into the module since {type(self).__name__} took it, and its "
                    "gradient would not be averaged: change the module before it is wrapped"
                )

    def name_of_unaveraged(self, parameters: Iterable[Tensor]) -> str | None:
        """The first of an optimizer's parameters whose gradient is not an average yet."""
        if 1 not in self._own_gradients:
            return None
        numbers = {self._stepped(p): number for number, p in enumerate(self._trained)}
        numbers |= {p: number for number, p in enumerate(self._trained)}
        for parameter in parameters:
            number = numbers.get(parameter)
            if number is not None and self._own_gradients[number] and self._has_own(number):
                names = {p: name for name, p in self.module.named_parameters()}
                return names[self._trained[number]]
        return None

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        split_group: dist.ProcessGroup | None = None,
        is_split: Callable[[str], bool] = lambda name: True,
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of the whole model's gradients, wherever they lie.

        After :meth:`finish_gradient_synchronization` (and a GradScaler's ``unscale_``), by all
        ranks together. Ranks of the context-parallel axis are among the container's.

        Args:
            split_group: the tensor-parallel ranks, if the model is split over some.
            is_split: whether these ranks hold parts of the parameter of a name, and not copies,
                such as by :func:`parallel.tensor.plan.split_dim`.

        Returns:
            The norm before, equal on all ranks.

        Raises:
            RuntimeError: a gradient is not an average yet; or, with ``error_if_nonfinite``, the
                norm is not finite, on all ranks.
        """
        parameters = [(name.removeprefix("module."), p) for name, p in self.named_parameters()]
        own = self.name_of_unaveraged(p for _, p in parameters)
        if own is not None:
            raise RuntimeError(
                f"clip_grad_norm_(): the gradient of {own} is this rank's own: call the model's "
                "finish_gradient_synchronization() first"
            )
        splits = split_group is not None
        clipped = [self._clipped(p, is_split=splits and is_split(n)) for n, p in parameters]
        if not any(c.is_part or c.is_split for c in clipped):
            return nn.utils.clip_grad_norm_(
                [p for _, p in parameters], max_norm, norm_type, error_if_nonfinite
            )
        return clip_by_global_norm(
            clipped,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            group=self._group,
            split_group=split_group,
        )

    def _clipped(self, parameter: nn.Parameter, *, is_split: bool) -> Clipped:
        return Clipped(parameter=parameter, is_part=False, is_split=is_split)

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        """What an optimizer steps for a parameter of the module."""
        return parameter

    def _has_own(self, number: int) -> bool:
        """Whether a gradient has neither been thrown away nor zeroed since it came."""
        gradient = self._trained[number].grad
        return gradient is not None and bool(gradient.as_subclass(Tensor).any())

    def _unused(self) -> list[tuple[int, GradientTransfer, int]]:
        """Parameters without a gradient here: number, transfer, and place in the transfer."""
        found, first = [], 0
        for transfer in self._transfers:
            found += [(first + place, transfer, place) for place in transfer.absent]
            first += len(transfer.parameters)
        return found

    def _start_exchanging_used(self, unused: list[int]) -> dist.Work | None:
        """Begin to find out which parameters have a gradient on any rank, a byte a parameter.

        In every step, since a rank that has all gradients cannot know of the others.
        """
        if self.world_size == 1:
            return None
        self._used.fill_(1)
        if unused:
            self._used[torch.tensor(unused, device=self._used.device)] = 0
        work = dist.all_reduce(self._used, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if self._replicas is None or work is None:
            return work
        work.wait()
        return dist.all_reduce(self._used, dist.ReduceOp.MAX, group=self._replicas, async_op=True)

    def _register_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note each gradient that autograd has completed, and start transfers if they overlap."""
        # Parameters outlive the container where the caller keeps the module.
        this = weakref.ref(self)
        first = len(self._trained) - len(parameters)
        for number, parameter in enumerate(parameters, first):

            def complete(parameter: Tensor, number: int = number) -> None:
                container = this()
                if container is not None:
                    container._own_gradients[number] = 1
                    if container._overlaps and container._synchronizes:
                        container._complete(container._index_of[parameter])

            parameter.register_post_accumulate_grad_hook(complete)

    def _complete(self, index: int) -> None:
        """Note a complete gradient of transfer ``index``, and start the transfers that are ready.

        In one order on all ranks, in whatever order gradients come: ranks that used different
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
        """Start the transfers before ``number`` that have not been started."""
        progress = self._progress
        while progress.num_started < number:
            self._transfers[progress.num_started].start(self._averager)
            progress.num_started += 1


def _require_unwrapped(module: nn.Module) -> None:
    """Raise ValueError where another container has the module, or a part of it."""
    for name, inner in module.named_modules():
        if isinstance(inner, DataParallel):
            raise ValueError(
                f"{name or 'the module'} is in a {type(inner).__name__} already: wrap the whole "
                "module once; FSDP takes its blocks by blocks="
            )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "shard_of_it"):
            raise ValueError(
                f"{name} is this rank's shard, of another container of the module: wrap a new one"
            )


class _Progress:
    """How far a backward pass has come; attributes of a module would be slow to set."""

    __slots__ = ("_sizes", "missing", "num_started")

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.start_over()

    def start_over(self) -> None:
        self.num_started = 0
        """Transfers that have started."""
        self.missing = list(self._sizes)
        """Gradients that each transfer still waits for."""

    @property
    def has_begun(self) -> bool:
        return self.num_started > 0 or self.missing != self._sizes
