"""Reads a Chrome trace that torch.profiler exported, of any size.

The file is JSON, easily hundreds of megabytes; it is decoded one event at a time.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from harness.profilers.kernels.categories import Cost, operator_cost
from harness.profilers.kernels.profile_trace import NumberedTexts, ProfileTrace

CHUNK = 1 << 20

_PYTORCHS_OWN = (
    "ProfilerStep#",
    "Optimizer.",
    "nccl:",
    "gloo:",
    "## ",
    "Torch-Compiled",
    "Pregraph",
)
"""Annotations that PyTorch makes itself."""

_KERNEL_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")


def trace_events(path: Path) -> Iterator[dict[str, Any]]:
    """The trace events of a file, plain or gzipped, one at a time.

    Raises ValueError that names the file if it is not a whole trace.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        try:
            yield from _array_elements(file, '"traceEvents"')
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: not a whole Chrome trace ({error})") from error


def _array_elements(file: IO[str], key: str) -> Iterator[Any]:
    """Elements of the JSON array under ``key``, decoded from one chunk of text at a time."""
    decoder = json.JSONDecoder()
    text = ""
    while (start := text.find(key)) < 0:
        chunk = file.read(CHUNK)
        if not chunk:
            raise ValueError(f"without {key}")
        text = text[-len(key) :] + chunk
    text = text[start + len(key) :]
    while "[" not in text:
        text += file.read(CHUNK) or "["
    position = text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position < len(text) and text[position] == "]":
            return
        try:
            element, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            chunk = file.read(CHUNK)
            if not chunk:
                raise ValueError("it ends in the middle") from None
            text, position = text[position:] + chunk, 0
            continue
        yield element


def read_chrome_trace(path: Path, phases: tuple[str, ...]) -> ProfileTrace:
    """The trace in a file of torch.profiler.

    Args:
        phases: names of the ranges that are phases of a step.

    Raises ValueError that names the file if it is not a whole trace.
    """
    trace = ProfileTrace(phases=phases)
    threads = NumberedTexts()
    costs: dict[tuple[str, str, str], int] = {}
    for event in trace_events(path):
        kind = event.get("cat")
        thread = threads.number(f"{event.get('pid')}/{event.get('tid')}")
        start, duration = float(event.get("ts", 0)), float(event.get("dur", 0))
        name, values = str(event.get("name", "")), event.get("args") or {}
        if kind == "cpu_op":
            cost = _number_of_cost(name, values, costs, trace.costs)
            trace.operators.add(thread, start, duration, trace.names.number(name), cost)
        elif kind == "user_annotation":
            if not name.startswith(_PYTORCHS_OWN):
                trace.ranges.add(thread, start, duration, trace.names.number(name), 0)
        elif kind in _LAUNCH_KINDS:
            number = int(values.get("correlation", 0))
            trace.launches.add(thread, start, duration, trace.names.number(name), number)
        elif kind in _KERNEL_KINDS:
            number = int(values.get("correlation", 0))
            trace.kernels.add(thread, start, duration, trace.names.number(name), number)
        elif kind == "fwdbwd":
            ends = trace.link_starts if event.get("ph") == "s" else trace.link_ends
            ends.add(thread, start, 0.0, 0, int(event["id"]))
    return trace


def _number_of_cost(
    name: str, values: dict[str, Any], known: dict[tuple[str, str, str], int], costs: list[Cost]
) -> int:
    """One more than the place of an operator's cost in ``costs``, or 0 where it has none."""
    dims, types = values.get("Input Dims"), values.get("Input type")
    if not dims or not types:
        return 0
    key = (name, str(dims), str(types))
    if key not in known:
        cost = operator_cost(name, dims, types)
        if cost is not None:
            costs.append(cost)
        known[key] = 0 if cost is None else len(costs)
    return known[key]
