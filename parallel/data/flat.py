"""Flat buffers: many tensors in one, cut into an equal shard for each rank.

One collective call then serves many parameters, whose tensors are views of the buffer, and a
rank's shard is contiguous whatever the parameters' shapes. ZeRO (Rajbhandari et al., 2020) and
PyTorch FSDP (Zhao et al., 2023, section 3.2.1) cut their parameters this way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, which warns of the name that older versions know alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ALIGNMENT = 64
"""Tensors and shards begin at multiples of this many elements.

128 bytes of bfloat16; matmuls want at least 16.
"""


class FlatLayout:
    """Positions of tensors in a flat buffer that is cut into ``num_shards`` equal shards.

    Each tensor keeps its shape and, if that has no holes, its strides: an optimizer's fused
    kernels want parameters, gradients and state laid out alike.
    """

    def __init__(self, tensors: Sequence[Tensor], num_shards: int = 1) -> None:
        self.num_shards = num_shards
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [torch.empty_like(tensor, device="meta").stride() for tensor in tensors]
        self.sizes = [tensor.numel() for tensor in tensors]
        self.offsets = []
        end = 0
        for size in self.sizes:
            self.offsets.append(end)
            end += _aligned(size)
        self.shard_size = _aligned(-(-end // num_shards))
        self.size = self.shard_size * num_shards

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in ``buffer``, [size]."""
        places = zip(self.shapes, self.strides, self.offsets, strict=True)
        start = buffer.storage_offset()
        return [buffer.as_strided(shape, stride, start + at) for shape, stride, at in places]

    def shard(self, buffer: Tensor, index: int) -> Tensor:
        """Shard ``index`` of ``buffer``: [shard_size], a view."""
        return buffer.narrow(0, index * self.shard_size, self.shard_size)

    def held(self, place: int, index: int) -> tuple[int, int]:
        """(start, stop) in memory order of the elements of tensor ``place`` in shard ``index``."""
        offset, size = self.offsets[place], self.sizes[place]
        begin = index * self.shard_size
        start = min(max(begin - offset, 0), size)
        return start, min(max(begin + self.shard_size - offset, start), size)

    def split_shard(self, shard: Tensor, index: int) -> list[Tensor]:
        """The elements of each tensor in shard ``index`` of a buffer: 1-D views, maybe empty."""
        found = []
        for place, offset in enumerate(self.offsets):
            start, stop = self.held(place, index)
            at = offset + start - index * self.shard_size if stop > start else 0
            found.append(shard.narrow(0, at, stop - start))
        return found


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def start_all_gather(buffer: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill ``buffer`` with all ranks' shards; ``shard`` is this rank's, in its place."""
    work = _all_gather(buffer, shard, group=group, async_op=True)
    assert work is not None, "async_op returns a handle to members of the group"
    return work
