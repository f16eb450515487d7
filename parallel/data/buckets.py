"""Which parameters share a bucket, by their sizes alone: what predictions know of a model."""

from __future__ import annotations

from collections.abc import Iterable


def fill_buckets(sizes: Iterable[float], max_size: float) -> list[list[float]]:
    """Sizes of what lies in each bucket, filled in the given order up to ``max_size`` or by one.

    Of parameters of one dtype; :func:`parallel.data.flat.grouped` makes them of tensors.
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
