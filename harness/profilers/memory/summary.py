"""The memory profile in a record: bytes by category over time, the peak and what fills it.

events            allocations and frees of the step
start_bytes, peak_bytes, end_bytes
saved_bytes       activations at the end of the forward pass
at_peak           bytes by category
phases            [name, start_ms, end_ms]
times_ms, series  the thinned timeline, bytes by category; the peak is always in it
peak_ms           time of the peak
largest           kinds of allocations at the peak: bytes, category, where, count
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from harness.profilers.memory.timeline import (
    CATEGORIES,
    Allocation,
    Timeline,
    call_sites,
    thinned,
)
from models.checkpointing import CHECKPOINTED


def summarise(timeline: Timeline, *, points: int, largest: int) -> dict[str, Any]:
    """The summary of a timeline that a record keeps.

    Args:
        points: most points of the thinned timeline.
        largest: most kinds of allocations at the peak.
    """
    series = timeline.series()
    total = series.sum(axis=0)
    peak = int(total.argmax())
    columns = thinned(series, points)
    times = milliseconds(timeline)
    forward_ends = [mark.end for mark in timeline.marks if mark.name == "forward"]
    activations = series[CATEGORIES.index("activations")]
    return {
        "events": timeline.num_events,
        "start_bytes": int(total[0]),
        "peak_bytes": int(total[peak]),
        "end_bytes": int(total[-1]),
        "peak_ms": round(float(times[peak]), 4),
        "saved_bytes": int(activations[max(forward_ends)]) if forward_ends else 0,
        "at_peak": {
            name: int(row[peak]) for name, row in zip(CATEGORIES, series, strict=True) if row[peak]
        },
        "phases": phase_spans(timeline),
        "times_ms": [round(float(moment), 4) for moment in times[columns]],
        "series": {
            name: row[columns].tolist()
            for name, row in zip(CATEGORIES, series, strict=True)
            if row.any()
        },
        "largest": kinds(timeline.live_at(peak))[:largest],
    }


def kinds(allocations: Iterable[Allocation]) -> list[dict[str, Any]]:
    """Allocations grouped by size, category, name and place; all layers count as one name."""
    found: dict[tuple[int, str, str, tuple[str, ...]], int] = {}
    for item in allocations:
        # blocks.3.w1 -> blocks.*.w1
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", item.name)
        kind = (item.size, item.category, name, tuple(call_sites(item.frames)))
        found[kind] = found.get(kind, 0) + 1
    return [
        {
            "bytes": size,
            "category": category,
            "where": [name, *where] if name else [*where],
            "count": count,
        }
        for (size, category, name, where), count in found.items()
    ]


def milliseconds(timeline: Timeline) -> np.ndarray[Any, Any]:
    """Time of each column of the series since the first event, by the host's clock."""
    times = np.asarray(timeline.times_us or [0.0])
    return np.concatenate([[0.0], times - times[0]])[: timeline.num_events + 1] / 1e3


def phase_spans(timeline: Timeline) -> list[list[Any]]:
    """[name, start_ms, end_ms] of each phase with at least one allocator event."""
    times = milliseconds(timeline)
    spans = []
    for mark in timeline.marks:
        if mark.name != CHECKPOINTED and mark.end > mark.start:
            first, last = times[mark.start + 1], times[mark.end]
            spans.append([mark.name, round(float(first), 4), round(float(last), 4)])
    return spans
