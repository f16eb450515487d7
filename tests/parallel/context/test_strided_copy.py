"""Copies between strided views, against the same copy by indexing."""

from __future__ import annotations

import ctypes
import itertools
import random
from typing import Any

import pytest
import torch

from parallel.context.transports import strided_copy
from parallel.context.transports.strided_copy import StridedCopy, _Rectangle


def copied(shape: tuple[int, ...], dim: int, into_dim: int, start: int, length: int) -> bool:
    """Whether a slice along ``dim`` arrives in its place along ``into_dim``, and nothing else."""
    source = torch.arange(float(torch.Size(shape).numel())).view(shape)
    out = source.narrow(dim, start, length)
    longer = list(out.shape)
    longer[into_dim] += 3
    place = (into_dim, 2, out.shape[into_dim])
    target = torch.full(longer, -1.0)
    wanted = target.clone()
    wanted.narrow(*place).copy_(out)
    StridedCopy(torch.empty(longer, device="meta").narrow(*place), out).run(target, None)
    return torch.equal(target, wanted)


def by_rows(described: Any, stream: ctypes.c_void_p) -> int:
    """cuMemcpy2DAsync, of memory of this process."""
    one = described._obj
    assert one.source_memory == one.target_memory == _Rectangle.UNIFIED
    assert (one.source_x, one.source_y, one.target_x, one.target_y) == (0, 0, 0, 0)
    assert one.width <= min(one.source_pitch, one.target_pitch)
    assert stream.value == STREAM
    for row in range(one.height):
        there, here = (
            address + row * pitch
            for address, pitch in (
                (one.target_device, one.target_pitch),
                (one.source_device, one.source_pitch),
            )
        )
        ctypes.memmove(there, here, one.width)
    return 0


STREAM = 7


def test_what_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same copies by their descriptions, in tensors that begin anywhere in memory, twice."""
    monkeypatch.setattr(strided_copy, "_copy_2d", lambda: by_rows)
    draw = random.Random(4)
    for _ in range(100):
        shape = tuple(draw.randrange(1, 5) for _ in range(draw.randrange(1, 5)))
        dim, into_dim = (draw.randrange(len(shape)) for _ in range(2))
        source = torch.randn(3, *shape, dtype=torch.float64)[1].to(torch.bfloat16)
        start = draw.randrange(shape[dim])
        out = source.narrow(dim, start, draw.randrange(1, shape[dim] - start + 1))
        longer = list(out.shape)
        longer[into_dim] += 3
        place = (into_dim, 2, out.shape[into_dim])
        copy = StridedCopy(torch.empty(longer, device="meta", dtype=out.dtype).narrow(*place), out)
        for value in (0.0, 1.0):
            target = torch.full((2, *longer), value, dtype=torch.bfloat16)
            wanted = target.clone()
            wanted[1].narrow(*place).copy_(out)
            copy._run_on_copy_engine(target[1], STREAM)
            assert torch.equal(target, wanted)


def test_a_copy_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided_copy, "_copy_2d", lambda: lambda described, stream: 719)
    out = torch.zeros(2, 3)
    copy = StridedCopy(torch.empty(2, 3, device="meta"), out)
    with pytest.raises(RuntimeError, match=r"cuMemcpy2DAsync: 719\); attention\.transport=all_to"):
        copy._run_on_copy_engine(torch.zeros(2, 3), STREAM)


def test_every_dimension_into_every_other() -> None:
    for dim, into_dim in itertools.product(range(4), range(4)):
        for start, length in ((0, 1), (1, 2), (0, 2)):
            assert copied((3, 4, 5, 6), dim, into_dim, start, length), (dim, into_dim, start)


def test_shapes_at_random() -> None:
    draw = random.Random(3)
    for _ in range(300):
        shape = tuple(draw.randrange(1, 5) for _ in range(draw.randrange(1, 5)))
        dim, into_dim = (draw.randrange(len(shape)) for _ in range(2))
        start = draw.randrange(shape[dim])
        assert copied(shape, dim, into_dim, start, draw.randrange(shape[dim] - start + 1))


def test_rows_are_one_block() -> None:
    """Tokens of a head follow on each other, and heads of a token: one copy, not one for each."""
    dense, packed = torch.empty(1, 8, 32, 16), torch.empty(32, 8, 16)
    for out, shape, place in (
        (dense.narrow(1, 2, 4), (1, 4, 128, 16), (2, 64, 32)),
        (packed.narrow(1, 2, 4), (128, 4, 16), (0, 64, 32)),
    ):
        copy = StridedCopy(torch.empty(shape, device="meta").narrow(*place), out)
        assert len(copy._blocks) == 1
        assert copy.num_bytes == 4 * 32 * 16 * 4


def test_the_drivers_description() -> None:
    """CUDA_MEMCPY2D of cuda.h on 64 bits, and where the addresses lie in it."""
    assert ctypes.sizeof(_Rectangle) == 128
    assert _Rectangle.source_device.offset == 32
    assert _Rectangle.target_x.offset == 56
    assert _Rectangle.target_device.offset == 88
    assert _Rectangle.width.offset == 112
