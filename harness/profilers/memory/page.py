"""The memory timeline as one HTML file that needs no network."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from harness.profilers.memory.summary import milliseconds, phase_spans
from harness.profilers.memory.timeline import CATEGORIES, Timeline, call_sites, thinned
from harness.render.palette import MEMORY_COLOURS

TEMPLATE = Path(__file__).with_name("page.html")

MAX_STACK = 12


def write_page(path: Path, timeline: Timeline, title: str, max_events: int) -> int:
    """Write the page, and return the number of points of its timeline."""
    data = page_data(timeline, max_events)
    # Escaped, since text of a trace could end the script that contains it.
    text = json.dumps(data | {"title": title}, separators=(",", ":")).replace("</", "<\\/")
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("@TITLE@", html.escape(title)).replace("@DATA@", text)
    path.write_text(page, encoding="utf-8")
    return len(data["times"])


def page_data(timeline: Timeline, max_events: int) -> dict[str, Any]:
    """The data of the page's script.

    The largest ``max_events`` allocations are drawn one by one, the others as the rest of their
    category.
    """
    series = timeline.series()
    columns = thinned(series, max_events)
    times = milliseconds(timeline)
    total = series.sum(axis=0)
    named = sorted(timeline.allocations, key=lambda item: -item.size)[:max_events]
    stacks: dict[tuple[str, ...], int] = {}
    allocations = []
    for item in named:
        places = call_sites(item.frames, MAX_STACK)
        stack = tuple([item.name, *places] if item.name else places)
        number = stacks.setdefault(stack, len(stacks))
        end = timeline.num_events if item.end is None else item.end
        span = [round(float(times[item.start + 1]), 4), round(float(times[end]), 4)]
        category = CATEGORIES.index(item.category)
        # Whether it was in use before the step, and whether it still is after it.
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
