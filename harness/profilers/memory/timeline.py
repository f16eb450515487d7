"""A timeline of memory by category, from a snapshot of the allocator.

The snapshot has the format of ``torch.cuda.memory._snapshot()``, which the viewer at
pytorch.org/memory_viz reads: ``device_traces``, for each device a list of entries with
``action``, ``addr``, ``size``, ``frames`` and ``time_us``, and ``segments`` with the ``blocks``
in use at the end. Memory in use from the start has no allocation in the trace; it shows as a
free without one, or as a final block that the trace does not know.

Sizes are those requested. The allocator's own count is larger: it rounds to 512 bytes, and adds
the rest of a segment where that is too small to be split off.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.paths import ROOT
from models.checkpointing import CHECKPOINTED

CATEGORIES = (
    *("parameters", "gradients", "optimizer state", "activations", "temporaries"),
    *("communication", "other"),
)
"""In the figure's order from the bottom up. ``other`` was in use before the step, and unknown."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EventSpan:
    """A named part of the step, from one allocator event (allocation or free) to another."""

    name: str
    start: int
    end: int


@dataclass(kw_only=True, slots=True, frozen=True)
class KnownTensor:
    """The tensor that lay at an address at a moment of the step."""

    category: str
    name: str
    address: int
    at: int
    """Allocator events before that moment."""


@dataclass(kw_only=True, slots=True)
class Allocation:
    """A piece of memory, from its allocation to its free."""

    address: int
    size: int
    start: int
    """Index of the event that allocated it; -1 if it was in use from the start."""
    end: int | None = None
    """Index of the event that freed it; None if it was in use at the end."""
    frames: Sequence[dict[str, Any]] = ()
    category: str = "other"
    name: str = ""
    """Name of the tensor, if known."""


@dataclass(kw_only=True, slots=True)
class Timeline:
    """Every allocation of a device, and the time of each of its events."""

    allocations: list[Allocation]
    times_us: list[float]
    marks: list[EventSpan] = field(default_factory=list)

    @property
    def num_events(self) -> int:
        return len(self.times_us)

    def series(self) -> np.ndarray[Any, Any]:
        """Bytes by category before the first event and after each: [C, events + 1]."""
        change = np.zeros((len(CATEGORIES), self.num_events + 1), dtype=np.int64)
        for item in self.allocations:
            row = CATEGORIES.index(item.category)
            change[row, item.start + 1] += item.size
            if item.end is not None:
                change[row, item.end + 1] -= item.size
        return change.cumsum(axis=1)

    def live_at(self, column: int) -> list[Allocation]:
        """Allocations in use in a column of :meth:`series`, largest first."""
        found = [
            item
            for item in self.allocations
            if item.start < column and (item.end is None or item.end >= column)
        ]
        return sorted(found, key=lambda item: -item.size)


def read_timeline(
    snapshot: dict[str, Any],
    *,
    device: int = 0,
    marks: Iterable[EventSpan] = (),
    known: Iterable[KnownTensor] = (),
) -> Timeline:
    """The timeline of one device. ValueError if the snapshot has no trace of it."""
    traces = snapshot.get("device_traces") or []
    if device >= len(traces):
        raise ValueError(f"the snapshot has no trace of device {device}")
    timeline = _walk(traces[device], _final_blocks(snapshot, device))
    timeline.marks = sorted(marks, key=lambda mark: mark.start)
    _categorise(timeline, list(known))
    return timeline


def _final_blocks(snapshot: dict[str, Any], device: int) -> dict[int, dict[str, Any]]:
    """Blocks in use when the snapshot was taken, by address."""
    blocks = {}
    for segment in snapshot.get("segments") or []:
        if segment.get("device", 0) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks[block.get("address", address)] = block
            address += block["size"]
    return blocks


def _walk(trace: list[dict[str, Any]], final: dict[int, dict[str, Any]]) -> Timeline:
    allocations: list[Allocation] = []
    live: dict[int, Allocation] = {}
    times: list[float] = []
    for entry in trace:
        action = entry["action"]
        # Like torch.cuda.memory_allocated, which counts memory until its free is requested.
        if action not in ("alloc", "free_requested"):
            continue
        address, index = int(entry["addr"]), len(times)
        times.append(float(entry.get("time_us", index)))
        if action == "alloc":
            if address in live:
                # Freed by something that the trace does not see.
                live.pop(address).end = index
            item = Allocation(
                address=address, size=entry["size"], start=index, frames=entry.get("frames") or ()
            )
            allocations.append(item)
            live[address] = item
        elif address in live:
            live.pop(address).end = index
        else:
            allocations.append(Allocation(address=address, size=entry["size"], start=-1, end=index))
    for address, block in final.items():
        if address not in live:
            size = block.get("requested_size", block["size"])
            frames = block.get("frames") or ()
            allocations.append(Allocation(address=address, size=size, start=-1, frames=frames))
    return Timeline(allocations=allocations, times_us=times)


def _categorise(timeline: Timeline, known: list[KnownTensor]) -> None:
    by_address: dict[int, list[Allocation]] = {}
    for item in timeline.allocations:
        by_address.setdefault(item.address, []).append(item)
        item.category = _by_lifetime(item, timeline.marks)
        if is_communication(item.frames):
            item.category = "communication"
    for tensor in known:
        for item in by_address.get(tensor.address, ()):
            if item.start < tensor.at and (item.end is None or item.end >= tensor.at):
                item.category, item.name = tensor.category, tensor.name


def _by_lifetime(item: Allocation, marks: list[EventSpan]) -> str:
    """Activations outlive the forward pass that made them, or its recomputation."""
    if item.start < 0:
        return "other"
    if not any(mark.name == "backward" for mark in marks):
        return "temporaries"
    backward = [mark for mark in marks if mark.name == "backward"]
    for mark in marks:
        inside = mark.start <= item.start < mark.end
        outlives = item.end is None or item.end >= mark.end
        if not inside or not outlives:
            continue
        if mark.name == "forward":
            return "activations"
        if mark.name == CHECKPOINTED and any(
            other.start <= mark.start < other.end for other in backward
        ):
            return "activations"
    return "temporaries"


def is_communication(frames: Sequence[dict[str, Any]]) -> bool:
    """Whether the innermost frame of the project, or one within it, communicates."""
    for frame in frames:
        name, file = frame["name"], place_in_source(frame)
        if name.startswith(("c10d::", "nccl:", "gloo:")) or file.startswith("torch/distributed/"):
            return True
        if file.startswith(("models/", "kernels/", "harness/", "parallel/")):
            return file.startswith("parallel/")
    return False


def place_in_source(frame: dict[str, Any]) -> str:
    """The file of a frame relative to its project or package."""
    file = str(frame.get("filename", ""))
    if file.startswith(f"{ROOT}/"):
        return file[len(str(ROOT)) + 1 :]
    return re.split(r"(?:site|dist)-packages/", file)[-1] if "-packages/" in file else file


_NOISE = (
    *("torch/nn/modules/module.py", "torch/autograd/", "torch/_ops.py", "torch/utils/"),
    *("torch/profiler/", "torch/_tensor.py", "harness/"),
)
"""Files that most allocations pass through, and that do not tell one from another."""


def call_sites(frames: Sequence[dict[str, Any]], limit: int = 8) -> list[str]:
    """The stack of an allocation, innermost call first, as ``file:line function``."""
    places: list[str] = []
    for frame in frames:
        file = place_in_source(frame)
        nowhere = file in ("", "??") and "::" not in frame["name"]
        if file.startswith((*_NOISE, "<")) or nowhere:
            continue
        if file.startswith("/"):
            # Outside any package: only the file's name means anything elsewhere.
            file = file.rpartition("/")[2]
        places.append(f"{file}:{frame['line']} {frame['name']}" if file else frame["name"])
    return places[:limit]


def thinned(series: np.ndarray[Any, Any], limit: int) -> np.ndarray[Any, Any]:
    """At most ``limit`` columns of a series: the largest and the last of each of equal parts.

    The peak is always among them.
    """
    total = series.sum(axis=0)
    if len(total) <= limit:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), max(1, (limit - 2) // 2) + 1).astype(int)
    kept = {0}
    for start, end in itertools.pairwise(edges):
        kept |= {int(start + total[start:end].argmax()), int(end - 1)}
    return np.array(sorted(kept))
