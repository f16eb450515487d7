"""Flat buffers: many tensors in one, cut into an equal part for each rank.

One collective call then serves many parameters, whose tensors are views of the buffer, and a
rank's part of the buffer is contiguous whatever the parameters' shapes. ZeRO (Rajbhandari et
al., 2020) and PyTorch FSDP (Zhao et al., 2023, section 3.2.1) cut their parameters so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, which warns of the name that older versions know alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ALIGNMENT = 64
"""Elements: where a tensor or a part begins. 128 bytes of bfloat16; matmuls want at least 16."""


class FlatLayout:
    """Where tensors lie in a flat buffer that is cut into ``num_parts`` equal parts.

    Each keeps its shape and, if that has no holes, its strides: an optimizer's fused kernels
    want parameters, gradients and state laid out alike.
    """

    def __init__(self, tensors: Sequence[Tensor], num_parts: int = 1) -> None:
        self.num_parts = num_parts
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [torch.empty_like(tensor, device="meta").stride() for tensor in tensors]
        self.sizes = [tensor.numel() for tensor in tensors]
        self.offsets = []
        end = 0
        for size in self.sizes:
            self.offsets.append(end)
            end += _aligned(size)
        self.part_size = _aligned(-(-end // num_parts))
        self.size = self.part_size * num_parts

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in ``buffer``, [size]."""
        places = zip(self.shapes, self.strides, self.offsets, strict=True)
        start = buffer.storage_offset()
        return [buffer.as_strided(shape, stride, start + at) for shape, stride, at in places]

    def part(self, buffer: Tensor, number: int) -> Tensor:
        """Part ``number`` of ``buffer``: [part_size], a view."""
        return buffer.narrow(0, number * self.part_size, self.part_size)

    def held(self, place: int, number: int) -> tuple[int, int]:
        """Which elements of tensor ``place``, in memory order, part ``number`` holds: from, to."""
        offset, size = self.offsets[place], self.sizes[place]
        begin = number * self.part_size
        start = min(max(begin - offset, 0), size)
        return start, min(max(begin + self.part_size - offset, start), size)

    def slices(self, part: Tensor, number: int) -> list[Tensor]:
        """Of each tensor what ``part``, part ``number`` of a buffer, holds: 1-D, maybe empty."""
        found = []
        for place, offset in enumerate(self.offsets):
            start, stop = self.held(place, number)
            at = offset + start - number * self.part_size if stop > start else 0
            found.append(part.narrow(0, at, stop - start))
        return found


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def grouped(tensors: Sequence[Tensor], max_bytes: float = math.inf) -> list[list[Tensor]]:
    """Groups of at most ``max_bytes``, each of one dtype, in the order of the tensors.

    A tensor that is larger than that has a group of its own.
    """
    open_groups: dict[torch.dtype, list[Tensor]] = {}
    room: dict[torch.dtype, float] = {}
    full: list[list[Tensor]] = []
    for tensor in tensors:
        dtype, num_bytes = tensor.dtype, tensor.numel() * tensor.element_size()
        if dtype in open_groups and num_bytes > room[dtype]:
            full.append(open_groups.pop(dtype))
        if dtype not in open_groups:
            open_groups[dtype], room[dtype] = [], max_bytes
        open_groups[dtype].append(tensor)
        room[dtype] -= num_bytes
    return [*full, *open_groups.values()]


class Averaging:
    """Starts averages over a group; every rank's values are divided before they are summed.

    float16 might not hold the sum. What is the same in every call is found out once: a step has
    hundreds of them, and what they cost the host a GPU waits for where it is the faster of both.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        averages = dist.get_backend(group) == "nccl"
        operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._divisor = None if averages else group.size()
        self._reducing, self._scattering = dist.AllreduceOptions(), dist.ReduceScatterOptions()
        for options in (self._reducing, self._scattering):
            options.reduceOp = operation
            # Else NCCL runs on the current stream, and what follows waits for it.
            options.asyncOp = True
        # Renamed in torch 2.13.
        self._reduce_scatter = (
            getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
        )

    def start(self, tensor: Tensor, received: Tensor | None = None) -> dist.Work:
        """Begin to average ``tensor``: in place, or a part of it into ``received``.

        With ``received``, this rank's part alone is there, and ``tensor`` is not to be read
        again (reduce-scatter); ``received`` may be that part of ``tensor`` itself.
        """
        if self._divisor is not None:
            tensor.div_(self._divisor)
        # Not by dist.all_reduce and the like, which take as long to check what is known here.
        if received is None:
            return self._group.allreduce([_real(tensor)], self._reducing)
        work: dist.Work = self._reduce_scatter(_real(received), _real(tensor), self._scattering)
        return work


def start_all_gather(buffer: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill ``buffer`` with all ranks' parts; ``part`` is this rank's, in its place."""
    work = _all_gather(buffer, part, group=group, async_op=True)
    assert work is not None, "async_op returns a handle to members of the group"
    return work


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, which can be averaged and sent as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Lane:
    """A stream of a GPU for small work that must not wait for what is launched meanwhile.

    On a CPU there is none, and what is run in it is run at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def runs_beside(self) -> bool:
        return self._stream is not None

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """What is launched in here starts when all that was launched before it has ended."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """This point of the lane, for :func:`wait_for`."""
        return None if self._stream is None else self._stream.record_event()


def wait_for(mark: torch.cuda.Event | None) -> None:
    """What is launched on the current stream from here on starts after the mark."""
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)
