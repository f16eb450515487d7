"""Gradients of shards: reduce-scatter of whole gradients, and the containers that train shards."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.clipping import Clipped, PartOfGradient
from parallel.data.data_parallel import DataParallel
from parallel.data.flat import FlatLayout
from parallel.data.gradients import Averager
from parallel.data.hybrid_sharding import HybridAverager
from parallel.streams import SideStream, StreamEvent


@dataclass(kw_only=True, slots=True, frozen=True)
class ShardedParameters:
    """Whole parameters of one dtype that lie in one flat buffer, and this rank's shards of them."""

    parameters: Sequence[nn.Parameter]
    shards: Sequence[nn.Parameter]
    layout: FlatLayout
    index: int
    """The number of this rank's shard of the buffer."""


class ShardTransfer:
    """Averages gradients of whole parameters, so that each rank receives those of its shards.

    One reduce-scatter, or an all-reduce where the layout has one shard, which all ranks hold.
    Starting it takes the gradients from the whole parameters. Shards that already have a
    gradient, since nobody has zeroed it, add to it.

    Args:
        side_stream: where the work that follows the transfer is launched.
        dtype: in which gradients travel.
        keeps_buffer: hold memory for all gradients, and receive in it; else the memory lives
            from the start of the transfer to its end.
    """

    def __init__(
        self,
        sharded: ShardedParameters,
        *,
        side_stream: SideStream,
        dtype: torch.dtype,
        keeps_buffer: bool = False,
    ) -> None:
        self.parameters, self.shards = tuple(sharded.parameters), tuple(sharded.shards)
        self.absent: list[int] = []
        self._layout, self._index = sharded.layout, sharded.index
        self._side_stream, self._dtype = side_stream, dtype
        self._kept = self._make_memory(self._make_buffer(), keeps=True) if keeps_buffer else None
        self._memory: _TransferMemory | None = None
        """The transfer's memory, from its start to its end."""
        self._under_way: _UnderWay | None = None
        self._gradients: list[Tensor] = []
        """The shards' gradients, from the end of a transfer on."""

    def _make_buffer(self) -> Tensor:
        return self._new(self._layout.size, self._dtype)

    def _make_memory(self, buffer: Tensor, *, keeps: bool = False) -> _TransferMemory:
        layout = self._layout
        converts = self._dtype != self.shards[0].dtype
        if layout.num_shards == 1:
            received = buffer
        elif keeps or converts:
            received = layout.shard(buffer, self._index)
        else:
            # The gradient itself; a view of the buffer would keep all of it.
            received = self._new(layout.shard_size, self._dtype)
        gradient = received
        if converts:
            gradient = self._new(layout.shard_size, self.shards[0].dtype)
        gradients = layout.split_shard(gradient, self._index)
        if layout.num_shards > 1:
            gradients = [part.as_subclass(PartOfGradient) for part in gradients]
        return _TransferMemory(
            buffer=buffer,
            views=layout.views(buffer) if keeps else [],
            received=received,
            gradient=gradient,
            gradients=gradients,
        )

    def start(self, averager: Averager | None) -> None:
        before: list[Tensor | None] = [shard.grad for shard in self.shards]
        adds = any(gradient is not None for gradient in before)
        if adds and self._kept is not None:
            # They lie where the new ones will be received.
            before = [None if gradient is None else gradient.clone() for gradient in before]
        buffer = self._make_buffer() if self._kept is None else self._kept.buffer
        self._fill(self._layout.views(buffer) if self._kept is None else self._kept.views)
        # The received shard may take the memory of the gradients that were just freed.
        memory = self._memory = self._kept or self._make_memory(buffer)
        under_way = self._under_way = _UnderWay(before=before if adds else [])
        follows = adds or memory.received is not memory.gradient
        follows = follows or isinstance(averager, HybridAverager)
        if self._side_stream.runs_beside and follows:
            # All memory belongs to the current stream: it is freed only after that has waited.
            with self._side_stream.after_current():
                self._send(averager, memory, under_way)
                self._settle(memory, under_way)
                under_way.settled_event = StreamEvent(buffer.device)
        else:
            self._send(averager, memory, under_way)

    def _send(
        self, averager: Averager | None, memory: _TransferMemory, under_way: _UnderWay
    ) -> None:
        if averager is not None:
            whole = self._layout.num_shards == 1
            under_way.work = averager.start(memory.buffer, None if whole else memory.received)

    def _fill(self, views: Sequence[Tensor]) -> None:
        """Move every gradient into the buffer."""
        made, places = [], []
        self.absent = []
        for place, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            if parameter.grad is None:
                self.absent.append(place)
                view.zero_()
            else:
                made.append(parameter.grad)
                places.append(view)
                parameter.grad = None
        if made:
            torch._foreach_copy_(places, made)

    def _settle(self, memory: _TransferMemory, under_way: _UnderWay) -> None:
        """After the transfer: convert to the shards' dtype and add their earlier gradients."""
        if under_way.work is not None:
            under_way.work.wait()
        if memory.gradient is not memory.received:
            memory.gradient.copy_(memory.received)
        if under_way.before:
            pairs = zip(memory.gradients, under_way.before, strict=True)
            added = [(new, old) for new, old in pairs if old is not None]
            torch._foreach_add_([new for new, _ in added], [old for _, old in added])
        under_way.settled = True

    def wait(self) -> None:
        memory, under_way = self._memory, self._under_way
        if memory is None or under_way is None:
            return
        if not under_way.settled:
            self._settle(memory, under_way)
        if under_way.settled_event is not None:
            under_way.settled_event.wait()
        # Frees the buffer, if it is not kept.
        self._memory = self._under_way = None
        self._gradients = memory.gradients
        for place, (shard, gradient) in enumerate(zip(self.shards, memory.gradients, strict=True)):
            if place not in self.absent:
                shard.grad = gradient

    def give(self, place: int) -> None:
        self.shards[place].grad = self._gradients[place]

    def let_go(self) -> None:
        """Leave the gradients to the shards, whose users may free them."""
        self._gradients = []

    def _new(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.shards[0].device)


@dataclass(kw_only=True, slots=True)
class _TransferMemory:
    """Memory of one transfer, or of all transfers in turn."""

    buffer: Tensor
    """Sent: all whole gradients."""
    views: list[Tensor]
    """Each whole gradient in the buffer, if it is kept."""
    received: Tensor
    gradient: Tensor
    """The received shard, in the dtype of the shards."""
    gradients: list[Tensor]
    """Each shard's view of ``gradient``."""


@dataclass(kw_only=True, slots=True)
class _UnderWay:
    """A transfer that has started."""

    before: list[Tensor | None]
    """Gradients that shards had before, if any had."""
    work: dist.Work | None = None
    settled: bool = False
    settled_event: StreamEvent | None = None


class ShardHolder(Protocol):
    """Whole parameters that are this rank's shards between steps."""

    def show_shards(self) -> None:
        """Make the parameters the shards, with their gradients."""

    def hide_shards(self) -> None:
        """Make them what passes use."""


class ShardedDataParallel(DataParallel):
    """Base of the containers whose ``parameters()`` and ``zero_grad`` are those of shards."""

    IN_FLIGHT: int | None = None
    """Transfers of gradients under way at once; None is no limit."""

    def __init__(
        self,
        module: nn.Module,
        *,
        overlap: bool,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._shards: dict[Tensor, nn.Parameter] = {}
        self._shows_shards = False
        """Whether the module's own parameters are the shards."""
        self._reads_module = False
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "device_mesh"):
                raise ValueError(
                    f"{name} is a DTensor, sharded already: PyTorch's fully_shard divides those "
                    "further, and this container does not"
                )
        super().__init__(module, overlap=overlap, group=group, replicas=replicas)
        self._train_flags = [shard.requires_grad for shard in self._shards.values()]
        if self._shards:
            self._refuse_states_of_shards()
        for whole, shard in self._shards.items():
            whole.shard_of_it = shard

    def _take_in_thawed(self) -> None:
        # A user sees shards in parameters(), and the module's own parameters in the module.
        for number, (whole, shard) in enumerate(self._shards.items()):
            before = self._train_flags[number]
            if whole.requires_grad is not before or shard.requires_grad is not before:
                self._train_flags[number] = not before
                whole.requires_grad_(not before)
                shard.requires_grad_(not before)
        super()._take_in_thawed()

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """This rank's shards, by the names of the whole parameters, equal on all ranks."""
        for name, parameter in super().named_parameters(*arguments, **options):
            yield name, self._shards.get(parameter, parameter)

    @property
    def shards(self) -> dict[Tensor, nn.Parameter]:
        """This rank's shard of each of the module's own parameters that has one."""
        return self._shards

    def shards_have_changed(self) -> None:
        """Take up values that were written into shards by others than optimizers."""

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._shards.get(parameter, parameter)

    def _has_own(self, number: int) -> bool:
        # A transfer takes the whole gradient, and its shard has one when the transfer ends.
        return self._progress.num_started > 0 or super()._has_own(number)

    def _clipped(self, parameter: nn.Parameter, *, is_split: bool) -> Clipped:
        origin = getattr(parameter, "origin", None)
        is_part = origin is not None and origin.is_part
        return Clipped(parameter=parameter, is_part=is_part, is_split=is_split)

    def zero_grad(self, set_to_none: bool = True) -> None:
        was_shown = self._shows_shards
        self._hide_shards()
        # Whole gradients too, which passes in no_sync() leave.
        self.module.zero_grad(set_to_none=True)
        super().zero_grad(set_to_none)
        if was_shown:
            self._show_shards()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for name, shard in self.named_parameters():
            before = shard.detach().new_empty(0)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise RuntimeError(
                    f"{name} is a shard of {before.dtype} on {before.device}: convert and move "
                    f"the module before {type(self).__name__} takes it"
                )
        return super()._apply(fn, recurse)

    def _holders(self) -> Sequence[ShardHolder]:
        """All that hold shards."""
        raise NotImplementedError

    def _show_shards(self) -> None:
        for holder in self._holders():
            holder.show_shards()
        self._shows_shards = True

    def _hide_shards(self) -> None:
        """Before anything uses parameters or their gradients as whole ones."""
        if self._shows_shards:
            self._shows_shards = False
            for holder in self._holders():
                holder.hide_shards()

    @contextlib.contextmanager
    def reading_module(self) -> Iterator[None]:
        """The module's own ``state_dict()`` may hold shards in here."""
        before, self._reads_module = self._reads_module, True
        try:
            yield
        finally:
            self._reads_module = before

    def _refuse_states_of_shards(self) -> None:
        """A file of one rank's shards looks like one of the model until somebody loads it."""
        this = weakref.ref(self)
        for inner in self.module.modules():
            known = weakref.ref(inner)

            def refuse(module: nn.Module, *_: Any, known: weakref.ref[nn.Module] = known) -> None:
                container = this()
                # Copies of a module have its hooks.
                if container is None or container._reads_module or module is not known():
                    return
                if container._shows_shards and container.world_size > 1:
                    raise RuntimeError(
                        "state_dict() of the module: its parameters are this rank's shards: "
                        "call state_dict() of the container, on all ranks"
                    )

            inner.register_state_dict_pre_hook(refuse)

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        if self._synchronizes:
            for transfer in self._transfers:
                if isinstance(transfer, ShardTransfer):
                    transfer.let_go()

    def _start_up_to(self, number: int) -> None:
        if self.IN_FLIGHT is not None:
            for index in range(self._progress.num_started, number):
                if index >= self.IN_FLIGHT:
                    self._transfers[index - self.IN_FLIGHT].wait()
                super()._start_up_to(index + 1)
        super()._start_up_to(number)
