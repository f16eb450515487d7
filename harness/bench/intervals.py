"""Sets of time as sorted, disjoint (start, end) pairs: unions, and what two have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], close_gaps: float = 0.0) -> list[Interval]:
    """The same time in as few intervals as can be; gaps up to ``close_gaps`` are filled."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + close_gaps:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The sum of lengths; of overlapping intervals take the union first."""
    return sum(end - start for start, end in intervals)


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """The time that is in both of two unions."""
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
    """What lies between ``start`` and ``end``."""
    cut = ((max(first, start), min(last, end)) for first, last in intervals)
    return [(first, last) for first, last in cut if last > first]
