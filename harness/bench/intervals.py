"""Sets of time as sorted, disjoint (start, end) pairs: union, length, overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], close_gaps: float = 0.0) -> list[Interval]:
    """Merge overlapping intervals, and those with gaps up to ``close_gaps`` between them."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + close_gaps:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """The total time that two unions have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        total += max(0.0, end - start)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def clipped(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """The parts of intervals between ``start`` and ``end``."""
    cut = ((max(first, start), min(last, end)) for first, last in intervals)
    return [(first, last) for first, last in cut if last > first]
