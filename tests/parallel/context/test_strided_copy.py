"""Copies between strided views, against the same copy by indexing."""

from __future__ import annotations

import ctypes
import itertools
import random

import torch

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
