"""The memory timeline as one HTML file: its data, its style and its script, and no network."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from harness.profilers.allocations.snapshot import CATEGORIES, Timeline, keep, told
from harness.render.figure import MEMORY_COLOURS

TEMPLATE = Path(__file__).with_name("memory.html")

MAX_STACK = 12


def write_page(path: Path, timeline: Timeline, title: str, max_events: int) -> int:
    """Write the page; returns how many points its timeline has."""
    data = page_data(timeline, max_events)
    # No text of a trace may end the script that it stands in.
    text = json.dumps(data | {"title": title}, separators=(",", ":")).replace("</", "<\\/")
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("@TITLE@", html.escape(title)).replace("@DATA@", text)
    path.write_text(page, encoding="utf-8")
    return len(data["times"])


def page_data(timeline: Timeline, max_events: int) -> dict[str, Any]:
    """What the page's script reads.

    The largest allocations are named and drawn each on its own; what is smaller is drawn as the
    rest of its category.
    """
    from harness.profilers.allocations.step import milliseconds, phase_spans

    series = timeline.series()
    columns = keep(series, max_events)
    times = milliseconds(timeline)
    total = series.sum(axis=0)
    named = sorted(timeline.allocations, key=lambda item: -item.size)[:max_events]
    stacks: dict[tuple[str, ...], int] = {}
    allocations = []
    for item in named:
        words = told(item.frames, MAX_STACK)
        stack = tuple([item.name, *words] if item.name else words)
        number = stacks.setdefault(stack, len(stacks))
        end = timeline.num_events if item.end is None else item.end
        span = [round(float(times[item.start + 1]), 4), round(float(times[end]), 4)]
        category = CATEGORIES.index(item.category)
        # Whether it was there before, and whether it stayed.
        open_ends = [item.start < 0, item.end is None]
        allocations.append([item.size, category, *span, number, *map(int, open_ends)])
    peak = int(total.argmax())
    return {
        "categories": [[name, MEMORY_COLOURS[name]] for name in CATEGORIES],
        "times": [round(float(moment), 4) for moment in times[columns]],
        "series": [row[columns].tolist() for row in series],
        "phases": phase_spans(timeline),
        "peak": [round(float(times[peak]), 4), int(total[peak])],
        "events": timeline.num_events,
        "num_allocations": len(timeline.allocations),
        "allocations": allocations,
        "stacks": [list(stack) for stack in stacks],
    }
