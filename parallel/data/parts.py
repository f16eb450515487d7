"""Parameters of which each rank trains a part: their gradients, and optimizers over them.

The whole parameters are what the module computes with. A *part* is a parameter of its own,
1-D, that holds those elements of a whole one that lie in this rank's part of a flat buffer;
it may be empty. Parts have the averaged gradients and are what optimizers step, so that state
exists for them alone. An optimizer must therefore treat elements one by one, as Adam and SGD
do (Rajbhandari et al., 2020, section 5; Zhao et al., 2023, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.containers import DataParallel
from parallel.data.flat import Averaging, FlatLayout, Lane, wait_for


class Owner(Protocol):
    """A container that keeps whole parameters beside the parts."""

    def start_parameter_gathering(self) -> None:
        """Begin to bring the parts that ranks have updated into every rank's whole parameters."""

    def wait_for_gathering(self) -> None:
        """What has been started is there."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Origin:
    """Where a part comes from: elements ``start`` to ``stop``, in memory order, of a parameter."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    stop: int
    group: dist.ProcessGroup | None
    owner: Callable[[], Owner | None]

    @property
    def num_elements(self) -> int:
        return self.shape.numel()

    def cut(self, whole: Tensor) -> Tensor:
        """This part of a tensor that is shaped as the whole parameter: 1-D."""
        laid_out = torch.empty_strided(
            self.shape, self.stride, dtype=whole.dtype, device=whole.device
        ).copy_(whole)
        flat = laid_out.as_strided((self.num_elements,), (1,))
        return flat[self.start : self.stop].clone()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole of all ranks' parts; of copies of it, the first."""
        flat = torch.cat(list(parts))[: self.num_elements]
        return flat.as_strided(self.shape, self.stride)


def make_parts(
    parameters: Sequence[nn.Parameter],
    layout: FlatLayout,
    part: Tensor,
    number: int,
    group: dist.ProcessGroup | None,
    owner: Callable[[], Owner | None] = lambda: None,
) -> list[nn.Parameter]:
    """A part of each parameter: views of ``part``, part ``number`` of a flat buffer."""
    found = []
    for place, (whole, values) in enumerate(
        zip(parameters, layout.slices(part, number), strict=True)
    ):
        start, stop = layout.held(place, number)
        parameter = nn.Parameter(values, requires_grad=whole.requires_grad)
        parameter.origin = Origin(
            shape=layout.shapes[place],
            stride=layout.strides[place],
            start=start,
            stop=stop,
            group=group,
            owner=owner,
        )
        found.append(parameter)
    return found


class PartAverage:
    """Gradients of whole parameters, averaged over ranks so that each receives those of its parts.

    One reduce-scatter, or an all-reduce where the layout has one part, which all ranks hold.
    Once it is started the whole parameters' gradients are gone. Parts that have a gradient
    already, since nobody has zeroed it, add to it.

    Args:
        parameters: whole, all of one dtype.
        parts: this rank's parts of them.
        layout: of the flat buffer that travels.
        number: of this rank's part of the buffer.
        lane: where what follows the transfer is launched.
        dtype: in which gradients travel.
        keeps_buffer: hold memory for all gradients, and receive in it; else it is there from
            the start of the transfer to its end.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        parts: Sequence[nn.Parameter],
        layout: FlatLayout,
        number: int,
        *,
        lane: Lane,
        dtype: torch.dtype,
        keeps_buffer: bool = False,
    ) -> None:
        self.parameters, self.parts = tuple(parameters), tuple(parts)
        self.absent: list[int] = []
        self._layout, self._number, self._lane, self._dtype = layout, number, lane, dtype
        self._kept = self._make_room(self._make_buffer(), keeps=True) if keeps_buffer else None
        self._room: _Room | None = None
        """From the start of a transfer to its end."""
        self._transfer: _Transfer | None = None
        self._slices: list[Tensor] = []
        """The parts' gradients, from the end of a transfer on."""

    def _make_buffer(self) -> Tensor:
        return self._new(self._layout.size, self._dtype)

    def _make_room(self, buffer: Tensor, *, keeps: bool = False) -> _Room:
        layout = self._layout
        converts = self._dtype != self.parts[0].dtype
        if layout.num_parts == 1:
            received = buffer
        elif keeps or converts:
            received = layout.part(buffer, self._number)
        else:
            # The gradient, which would keep the whole buffer.
            received = self._new(layout.part_size, self._dtype)
        gradient = received
        if converts:
            gradient = self._new(layout.part_size, self.parts[0].dtype)
        return _Room(
            buffer=buffer,
            views=layout.views(buffer) if keeps else [],
            received=received,
            gradient=gradient,
            slices=layout.slices(gradient, self._number),
        )

    def start(self, averaging: Averaging | None) -> None:
        before: list[Tensor | None] = [part.grad for part in self.parts]
        adds = any(gradient is not None for gradient in before)
        if adds and self._kept is not None:
            # They lie where the new ones come.
            before = [None if gradient is None else gradient.clone() for gradient in before]
        buffer = self._make_buffer() if self._kept is None else self._kept.buffer
        self._fill(self._layout.views(buffer) if self._kept is None else self._kept.views)
        # What is received may take the memory of the gradients that have just gone.
        room = self._room = self._kept or self._make_room(buffer)
        transfer = self._transfer = _Transfer(before=before if adds else [])
        if self._lane.runs_beside and (adds or room.received is not room.gradient):
            # All memory is of the current stream: it is not given back before that has waited.
            with self._lane.after_current():
                self._send(averaging, room, transfer)
                self._settle(room, transfer)
                transfer.mark = self._lane.mark()
        else:
            self._send(averaging, room, transfer)

    def _send(self, averaging: Averaging | None, room: _Room, transfer: _Transfer) -> None:
        if averaging is not None:
            whole = self._layout.num_parts == 1
            transfer.work = averaging.start(room.buffer, None if whole else room.received)

    def _fill(self, views: Sequence[Tensor]) -> None:
        """Bring every gradient into the buffer, and let go of it."""
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

    def _settle(self, room: _Room, transfer: _Transfer) -> None:
        """What follows the transfer: the parts' dtype, and what they had before."""
        if transfer.work is not None:
            transfer.work.wait()
        if room.gradient is not room.received:
            room.gradient.copy_(room.received)
        if transfer.before:
            pairs = zip(room.slices, transfer.before, strict=True)
            added = [(new, old) for new, old in pairs if old is not None]
            torch._foreach_add_([new for new, _ in added], [old for _, old in added])
        transfer.settled = True

    def wait(self) -> None:
        room, transfer = self._room, self._transfer
        if room is None or transfer is None:
            return
        if not transfer.settled:
            self._settle(room, transfer)
        wait_for(transfer.mark)
        # What has been sent goes, if it is not kept.
        self._room = self._transfer = None
        self._slices = room.slices
        for place, (part, gradient) in enumerate(zip(self.parts, room.slices, strict=True)):
            if place not in self.absent:
                part.grad = gradient

    def give(self, place: int) -> None:
        self.parts[place].grad = self._slices[place]

    def let_go(self) -> None:
        """Leave the gradients to the parts, whose users may free them."""
        self._slices = []

    def _new(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.parts[0].device)


@dataclass(kw_only=True, slots=True)
class _Room:
    """Memory of one transfer, or of all transfers in turn."""

    buffer: Tensor
    """What is sent."""
    views: list[Tensor]
    """Of each whole gradient in it, if it is kept."""
    received: Tensor
    gradient: Tensor
    """What has been received, in the dtype of the parts."""
    slices: list[Tensor]
    """Of each part in that."""


@dataclass(kw_only=True, slots=True)
class _Transfer:
    """A transfer that is under way."""

    before: list[Tensor | None]
    """Gradients that parts had before, if any had."""
    work: dist.Work | None = None
    settled: bool = False
    mark: torch.cuda.Event | None = None


class PartsDataParallel(DataParallel):
    """A container that trains parts: what ``parameters()`` and ``zero_grad`` are there."""

    IN_FLIGHT: int | None = None
    """Transfers of gradients under way at once; None is no limit."""

    def __init__(
        self, module: nn.Module, *, overlap: bool, group: dist.ProcessGroup | None = None
    ) -> None:
        self._parts: dict[Tensor, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "device_mesh"):
                raise ValueError(
                    f"{name} is a DTensor, sharded already: PyTorch's fully_shard divides those "
                    "further, and this container does not"
                )
        super().__init__(module, overlap=overlap, group=group)

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """This rank's parts, by the names of the whole parameters; the same on all ranks."""
        for name, parameter in super().named_parameters(*arguments, **options):
            yield name, self._parts.get(parameter, parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        # Whole ones too, which passes in no_sync() leave.
        self.module.zero_grad(set_to_none=True)
        super().zero_grad(set_to_none)

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        if self._synchronizes:
            for item in self._averaged:
                cast("PartAverage", item).let_go()

    def _start_up_to(self, number: int) -> None:
        if self.IN_FLIGHT is not None:
            for index in range(self._progress.num_started, number):
                if index >= self.IN_FLIGHT:
                    self._averaged[index - self.IN_FLIGHT].wait()
                super()._start_up_to(index + 1)
        super()._start_up_to(number)
