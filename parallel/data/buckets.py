"""Divides parameters into buckets: the tensors themselves, or for predictions their sizes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


def bucket_tensors(
    tensors: Sequence[torch.Tensor], max_bytes: float = math.inf
) -> list[list[torch.Tensor]]:
    """Buckets of at most ``max_bytes``, each of one dtype, filled in the given order.

    A larger tensor has a bucket of its own.
    """
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    room: dict[torch.dtype, float] = {}
    full: list[list[torch.Tensor]] = []
    for tensor in tensors:
        dtype, num_bytes = tensor.dtype, tensor.numel() * tensor.element_size()
        if dtype in open_buckets and num_bytes > room[dtype]:
            full.append(open_buckets.pop(dtype))
        if dtype not in open_buckets:
            open_buckets[dtype], room[dtype] = [], max_bytes
        open_buckets[dtype].append(tensor)
        room[dtype] -= num_bytes
    return [*full, *open_buckets.values()]


def fill_buckets(sizes: Iterable[float], max_size: float) -> list[list[float]]:
    """Sizes in each bucket that :func:`bucket_tensors` makes of parameters of one dtype."""
    found: list[list[float]] = []
    room = -1.0
    for size in sizes:
        if size > room:
            found.append([])
            room = max_size
        found[-1].append(size)
        room -= size
    return found
