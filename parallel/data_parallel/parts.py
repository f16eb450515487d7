"""Parameters of which each rank trains a part: their gradients, and optimizers over them.

The whole parameters are what the module computes with. A *part* is a parameter of its own,
1-D, that holds those elements of a whole one that lie in this rank's part of a flat buffer;
it may be empty. Parts have the averaged gradients and are what optimizers step, so that state
exists for them alone. An optimizer must therefore treat elements one by one, as Adam and SGD
do (Rajbhandari et al., 2020, section 5; Zhao et al., 2023, section 3.2.1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data_parallel.containers import DataParallel
from parallel.data_parallel.flat import Averaging, FlatLayout, Lane, wait_for


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
        self._kept = self._new(layout.size, dtype) if keeps_buffer else None
        self._transfer: _Transfer | None = None
        self._gradient: Tensor | None = None

    def start(self, averaging: Averaging | None) -> None:
        layout = self._layout
        before = [part.grad for part in self.parts]
        if self._kept is None:
            buffer = self._new(layout.size, self._dtype)
        else:
            # They lie where the new ones come.
            before = [None if gradient is None else gradient.clone() for gradient in before]
            buffer = self._kept
        self._fill(layout.views(buffer))
        if layout.num_parts == 1:
            received = buffer
        elif self._kept is not None:
            received = layout.part(buffer, self._number)
        else:
            received = self._new(layout.part_size, self._dtype)
        self._gradient = received
        if received.dtype != self.parts[0].dtype:
            self._gradient = self._new(layout.part_size, self.parts[0].dtype)
        transfer = _Transfer(buffer=buffer, received=received, before=before)
        settles = received is not self._gradient or any(old is not None for old in before)
        lane = self._lane if settles and self._lane.runs_beside else None
        # All memory is of the current stream: it is not given back before that has waited.
        with contextlib.nullcontext() if lane is None else lane.after_current():
            if averaging is not None:
                whole = layout.num_parts == 1
                transfer.work = averaging.start(buffer, None if whole else received)
            if lane is not None:
                self._settle(transfer)
                transfer.mark = lane.mark()
        self._transfer = transfer

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

    def _settle(self, transfer: _Transfer) -> None:
        """What follows the transfer: the parts' dtype, and what they had before."""
        assert self._gradient is not None, "made at the start"
        if transfer.work is not None:
            transfer.work.wait()
        if self._gradient is not transfer.received:
            self._gradient.copy_(transfer.received)
        if any(old is not None for old in transfer.before):
            slices = self._layout.slices(self._gradient, self._number)
            pairs = zip(slices, transfer.before, strict=True)
            added = [(new, old) for new, old in pairs if old is not None]
            torch._foreach_add_([new for new, _ in added], [old for _, old in added])
        transfer.settled = True

    def wait(self) -> None:
        if self._transfer is None:
            return
        if not self._transfer.settled:
            self._settle(self._transfer)
        wait_for(self._transfer.mark)
        self._transfer = None
        for place in range(len(self.parts)):
            if place not in self.absent:
                self.give(place)

    def give(self, place: int) -> None:
        assert self._gradient is not None, "made at the start"
        layout, number = self._layout, self._number
        start, stop = layout.held(place, number)
        at = layout.offsets[place] + start - number * layout.part_size if stop > start else 0
        self.parts[place].grad = self._gradient.narrow(0, at, stop - start)

    def let_go(self) -> None:
        """Leave the gradients to the parts, whose users may free them."""
        self._gradient = None

    def _new(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.parts[0].device)


@dataclass(kw_only=True, slots=True)
class _Transfer:
    """What a transfer that is under way reads and writes."""

    buffer: Tensor
    received: Tensor
    before: list[Tensor | None]
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
