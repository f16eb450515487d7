"""Copies between strided views, described once and run in every pass.

On CUDA a copy of rows of equal length and pitch is one two-dimensional memcpy (cuMemcpy2DAsync of
the CUDA driver), which copy engines run: a block is transposed, or taken out of a larger tensor, on
its way from a peer, and no SM is needed. PyTorch copies such a view with a kernel instead. On a CPU
the same rows are copied one block after another.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def stream_of_copies(device: torch.device) -> int | None:
    """The current stream's handle, asked for once before many copies; None where there is none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


@dataclass(kw_only=True, slots=True, frozen=True)
class _Block:
    """Rows of contiguous elements, at a constant distance from each other; in elements."""

    num_rows: int
    width: int
    into: int
    """Where the first row goes, from the beginning of the view."""
    out: int
    """Where it comes from, likewise."""
    into_pitch: int
    out_pitch: int


def copy_rows(into: Tensor, out: Tensor) -> None:
    """Copy by a kernel, as words of 8 bytes where rows are whole numbers of them.

    PyTorch's kernel of strided copies takes its time by elements, of bfloat16 four times as many.
    """
    if into.dtype == out.dtype and all(map(_is_of_words, (into, out))):
        into, out = into.view(torch.int64), out.view(torch.int64)
    into.copy_(out, non_blocking=True)


def _is_of_words(x: Tensor) -> bool:
    words = 8 // x.element_size()
    numbers = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    return x.stride(-1) == 1 and all(number % words == 0 for number in numbers)


class StridedCopy:
    """A copy out of one tensor, always the same, into a place in tensors of later calls.

    Args:
        into: the place, as a view of a tensor like those that :meth:`run` will be given; it may be
            on the device "meta".
        out: what is copied, in the shape of ``into``. Both have contiguous last dimensions.
    """

    def __init__(self, into: Tensor, out: Tensor) -> None:
        assert into.shape == out.shape, "a copy keeps the shape"
        assert into.dtype == out.dtype, "a copy keeps the dtype"
        self.num_bytes = out.numel() * out.element_size()
        self._out = out
        self._first = into.storage_offset()
        self._blocks = _blocks(out.shape, into.stride(), out.stride())
        self._rectangles: list[tuple[_Rectangle, int]] | None = None

    def run(self, target: Tensor, stream: int | None) -> None:
        """Copy into ``target`` on a stream of :func:`stream_of_copies`; the host does not wait."""
        if stream is not None:
            self._run_on_copy_engine(target, stream)
            return
        first, begin = target.storage_offset() + self._first, self._out.storage_offset()
        for block in self._blocks:
            shape = (block.num_rows, block.width)
            there = target.as_strided(shape, (block.into_pitch, 1), first + block.into)
            here = self._out.as_strided(shape, (block.out_pitch, 1), begin + block.out)
            there.copy_(here)

    def _run_on_copy_engine(self, target: Tensor, stream: int) -> None:
        if self._rectangles is None:
            self._rectangles = [self._rectangle(block) for block in self._blocks]
        base, handle = target.data_ptr(), ctypes.c_void_p(stream)
        for rectangle, offset in self._rectangles:
            rectangle.target_device = base + offset
            code = _copy_2d()(ctypes.byref(rectangle), handle)
            if code:
                raise RuntimeError(
                    "the CUDA driver refuses to copy from another GPU (cuMemcpy2DAsync: "
                    f"{code}); attention.transport=all_to_all does without"
                )

    def _rectangle(self, block: _Block) -> tuple[_Rectangle, int]:
        """The driver's description of a block, and where it goes in the target, in bytes."""
        size = self._out.element_size()
        rectangle = _Rectangle(
            source_memory=_Rectangle.UNIFIED,
            source_device=self._out.data_ptr() + block.out * size,
            source_pitch=block.out_pitch * size,
            target_memory=_Rectangle.UNIFIED,
            target_pitch=block.into_pitch * size,
            width=block.width * size,
            height=block.num_rows,
        )
        return rectangle, (self._first + block.into) * size


def _blocks(
    shape: Sequence[int], into_strides: Sequence[int], out_strides: Sequence[int]
) -> list[_Block]:
    """As few blocks as there are, of dimensions joined wherever both tensors allow it."""
    if 0 in shape:
        return []
    dims = _joined(zip(shape, into_strides, out_strides, strict=True))
    assert dims[-1][1:] == (1, 1), "the last dimension is contiguous"
    width = dims[-1][0]
    *outer, rows = ((1, 0, 0), *dims[:-1])
    num_rows, into_pitch, out_pitch = rows
    if num_rows == 1:
        into_pitch = out_pitch = width
    return [
        _Block(
            num_rows=num_rows,
            width=width,
            into=sum(place * dim[1] for place, dim in zip(places, outer, strict=True)),
            out=sum(place * dim[2] for place, dim in zip(places, outer, strict=True)),
            into_pitch=into_pitch,
            out_pitch=out_pitch,
        )
        for places in itertools.product(*(range(dim[0]) for dim in outer))
    ]


def _joined(dims: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sizes and both strides, where two dimensions are one if they follow on in both tensors."""
    found: list[tuple[int, int, int]] = []
    for size, into, out in dims:
        if size == 1:
            continue
        if found and found[-1][1:] == (size * into, size * out):
            found[-1] = (found[-1][0] * size, into, out)
        else:
            found.append((size, into, out))
    if not found or found[-1][1:] != (1, 1):
        found.append((1, 1, 1))
    return found


class _Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D of the CUDA driver, in bytes; addresses are of any device."""

    UNIFIED = 4

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_memory", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_memory", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@functools.cache
def _copy_2d() -> Any:
    """The driver's function, whose library is loaded already where there is a CUDA device."""
    return ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
