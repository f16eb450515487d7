"""Records PyTorch's CPU allocator during a step, in the format of a snapshot of CUDA memory.

torch.profiler sees every allocation and free, with the operators and Python calls around it. It
does not see memory in use before the step; that is found among all tensors that Python knows.
"""

from __future__ import annotations

import contextlib
import gc
import re
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity

from harness.profilers.memory.timeline import EventSpan

RECORDED = "recorded step"

_PYTHON_CALL = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)")


def storages_in_use(kinds: frozenset[type]) -> dict[int, int]:
    """Bytes of every CPU storage that a Python object refers to, by address.

    Args:
        kinds: all classes of tensors. Looking up the class of each of a million objects is no
            call; isinstance would be a million calls, each recorded by the profiler.
    """
    tensors: list[Any] = [item for item in gc.get_objects() if type(item) in kinds]
    found = {}
    for tensor in tensors:
        # Wrappers of other tensors have no memory of their own, and raise an error.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                # Empty storages, and those of fake tensors, have no address.
                if storage.data_ptr():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def tensor_classes(base: type = Tensor) -> frozenset[type]:
    """``base`` and every class derived from it so far."""
    return frozenset({base}).union(*map(tensor_classes, type.__subclasses__(base)))


def record(
    step: Callable[[], None], names: tuple[str, ...]
) -> tuple[dict[str, Any], list[EventSpan]]:
    """Run ``step`` twice, and return the snapshot and the named ranges of the second run.

    Args:
        names: the record_function ranges to return.
    """
    kinds = tensor_classes() - tensor_classes(FakeTensor)
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True
    ) as observed:
        # A warm-up: the first calls that the profiler sees are slow.
        step()
        gc.collect()
        before = storages_in_use(kinds)
        with torch.profiler.record_function(RECORDED):
            step()
    after = storages_in_use(kinds)
    events: list[tuple[int, int, int, list[dict[str, Any]]]] = []
    spans: list[tuple[str, int, int]] = []
    assert observed.profiler is not None, "it has run"
    stack = list(observed.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack += node.children
        kind = str(node.tag)
        if kind.endswith("Allocation"):
            values = node.extra_fields
            if str(values.device) == "cpu":
                frames = _frames_of(node) if values.alloc_size > 0 else []
                events.append((node.start_time_ns, values.alloc_size, values.ptr, frames))
        elif kind.endswith("TorchOp") and node.name in (*names, RECORDED):
            spans.append((node.name, node.start_time_ns, node.end_time_ns))
    ((_, begin, finish),) = [span for span in spans if span[0] == RECORDED]
    spans = [span for span in spans if span[0] != RECORDED and span[1] > begin]
    inside = (event for event in events if begin <= event[0] <= finish)
    events = sorted(inside, key=lambda event: event[0])
    # The profiler does not record the free of memory whose allocation it did not see.
    taken = {address for _, size, address, _ in events if size > 0}
    for address in sorted(before.keys() - after.keys() - taken):
        events.append((finish, -before[address], address, []))
    times = [event[0] for event in events]
    marks = [
        EventSpan(name=name, start=bisect_left(times, start), end=bisect_left(times, end))
        for name, start, end in spans
    ]
    return _snapshot(events, before), marks


def _frames_of(node: Any) -> list[dict[str, Any]]:
    """The operators and Python calls around an event, innermost first."""
    frames = []
    while (node := node.parent) is not None:
        match = _PYTHON_CALL.fullmatch(node.name)
        if match:
            values = {"filename": match["file"], "line": int(match["line"]), "name": match["name"]}
            frames.append(values)
        elif str(node.tag).endswith("TorchOp"):
            frames.append({"filename": "", "line": 0, "name": node.name})
    return frames


def _snapshot(
    events: list[tuple[int, int, int, list[dict[str, Any]]]], before: dict[int, int]
) -> dict[str, Any]:
    trace: list[dict[str, Any]] = []
    known: dict[int, tuple[int, list[dict[str, Any]]]]
    known = {address: (size, []) for address, size in before.items()}
    for time_ns, size, address, frames in events:
        entry = {"addr": address, "size": abs(size), "frames": frames, "stream": 0}
        entry |= {"time_us": time_ns // 1000, "device": 0, "segment_pool_id": (0, 0)}
        if size > 0:
            trace.append({"action": "alloc", **entry})
            known[address] = (size, frames)
        else:
            trace.append({"action": "free_requested", **entry})
            trace.append({"action": "free_completed", **entry})
            known.pop(address, None)
    segments = [
        {
            "device": 0,
            "address": address,
            "total_size": size,
            "allocated_size": size,
            "active_size": size,
            "requested_size": size,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": frames,
            "blocks": [
                {
                    "address": address,
                    "size": size,
                    "requested_size": size,
                    "state": "active_allocated",
                    "frames": frames,
                }
            ],
        }
        for address, (size, frames) in sorted(known.items())
    ]
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }
