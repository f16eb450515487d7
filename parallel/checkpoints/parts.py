"""A rank's part of a tensor, as torch.distributed.checkpoint saves and loads it.

A shard is a range of a parameter's elements in memory order, and checkpoints know boxes: offsets
and sizes in every dimension. A range of a matrix is at most three boxes (the end of a row, whole
rows, the beginning of a row), and of n dimensions at most 2n - 1. What other ranks hold, when the
checkpoint is saved or when it is loaded, does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from parallel.data.shards import ShardOrigin

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements start .. stop - 1, in row-major order, of a tensor of ``shape``."""
    if stop <= start:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * inner)
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * inner, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    inner = math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - row * inner, stop - row * inner):
        yield (row, *offsets), (1, *sizes)


class PartOfTensor(Tensor):
    """A shard's elements, 1-D, that says to torch.distributed.checkpoint where they belong.

    It is saved and loaded in place. Implements ``torch.distributed._checkpointable``.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    whole: torch.Size
    """Shape of the tensor of which this is a part."""
    pieces: dict[torch.Size, Tensor]
    """Views of the elements, box by box, by their offsets in the whole."""

    def size(self, dim: int | None = None) -> Any:
        return self.whole if dim is None else self.whole[dim]

    def new_empty(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "torch.distributed.checkpoint.async_save copies no parts of tensors: use "
            "parallel.checkpoints.save_checkpoint_in_background"
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.whole,
                ),
            )
            for offsets, piece in self.pieces.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=piece.size())
            for offsets, piece in self.pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "boxes are named by their offsets"
        return self.pieces[torch.Size(index.offset)]


def copy_of(part: PartOfTensor) -> PartOfTensor:
    """The same part in memory of its own, on the CPU."""
    plain = part.as_subclass(Tensor)
    copied = plain.to("cpu", copy=True)
    copy = copied.as_subclass(PartOfTensor)
    copy.whole, first = part.whole, plain.storage_offset()
    copy.pieces = {
        offsets: copied.as_strided(piece.size(), piece.stride(), piece.storage_offset() - first)
        for offsets, piece in part.pieces.items()
    }
    return copy


def part_of(elements: Tensor, origin: ShardOrigin) -> PartOfTensor:
    """``elements``, 1-D, of a shard or laid out like one, as a part of the whole."""
    plain = elements.detach().as_subclass(Tensor)
    part = plain.as_subclass(PartOfTensor)
    part.whole, part.pieces = origin.shape, {}
    # Dimensions in the order in which memory runs through them.
    order = sorted(range(len(origin.shape)), key=lambda dim: -origin.stride[dim])
    back = [order.index(dim) for dim in range(len(order))]
    at = 0
    for offsets, sizes in boxes([origin.shape[dim] for dim in order], origin.start, origin.stop):
        count = math.prod(sizes)
        piece = plain[at : at + count].view(sizes).permute(back)
        part.pieces[torch.Size(offsets[place] for place in back)] = piece
        at += count
    return part
