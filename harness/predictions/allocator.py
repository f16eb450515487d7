"""Bytes that PyTorch's allocator of CUDA memory counts for a tensor, which are not quite its own.

It takes memory from the driver in segments, and cuts a tensor's block from one unless at most
1 MiB would be left, which the block then keeps (``should_split`` in PyTorch's
c10/cuda/CUDACachingAllocator.cpp; c10/core/AllocatorConfig.h has the sizes). A weight of
39.1 MiB counts as 40.
"""

from __future__ import annotations

from collections.abc import Iterable

_MIB = 2**20

_BLOCK = 512
"""Sizes are multiples of this many bytes."""

_SMALL = _MIB
"""Up to here tensors share small segments, without a remainder that counts."""

_SHARED_SEGMENT, _LEAST_OWN = 20 * _MIB, 10 * _MIB
"""Tensors below the second size share segments of the first; larger ones have one of their own."""

_SEGMENT_STEP = 2 * _MIB
"""A segment of one tensor is a multiple of this."""


def counted_bytes(size: float) -> float:
    """Bytes that a tensor of ``size`` counts as, beside others of its size, in new segments."""
    block = -(-size // _BLOCK) * _BLOCK
    if block <= _SMALL:
        return block
    if block < _LEAST_OWN:
        in_segment = _SHARED_SEGMENT // block
        left = _SHARED_SEGMENT - in_segment * block
        return block + (left / in_segment if left <= _SMALL else 0.0)
    segment = -(-block // _SEGMENT_STEP) * _SEGMENT_STEP
    return segment if segment - block <= _SMALL else block


def rounding_bytes(sizes: Iterable[float]) -> float:
    """Bytes that tensors of these sizes count as beyond their own."""
    return sum(counted_bytes(size) - size for size in sizes)
