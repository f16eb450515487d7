"""Divides parameters into buckets by their sizes alone, for predictions."""

from __future__ import annotations

from collections.abc import Iterable


def fill_buckets(sizes: Iterable[float], max_size: float) -> list[list[float]]:
    """Sizes of the parameters in each bucket: at most ``max_size``, or one larger parameter.

    Filled in the given order by parameters of one dtype, as :func:`parallel.data.flat.grouped`
    does it with tensors.
    """
    found: list[list[float]] = []
    room = -1.0
    for size in sizes:
        if size > room:
            found.append([])
            room = max_size
        found[-1].append(size)
        room -= size
    return found
