"""One step under the memory profiler: record, tell tensors apart, summarise, write the page.

source            cuda or cpu
events            allocations and frees of the step
counted_events    the same as the allocator counts them, on CUDA
page_points       of them on the page; points, in the record; the peak is never left out
start_bytes, peak_bytes, end_bytes         by the timeline
allocator         on CUDA, the allocator's own: peak and end, as asked for and as rounded
tensor_bytes      exact sizes of parameters, gradients and optimizer state
saved_bytes       activations when the forward pass ends
at_peak           bytes by category
phases            [name, start_ms, end_ms]
times_ms, series  the thinned timeline, bytes by category
peak_ms           when
largest           at the peak, equal ones together: bytes, category, where, count
predicted         by formula, where the task has one
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.bench.bench import Bench
from harness.bench.program import Program
from harness.bench.step_memory import storages
from harness.cases.case import Case
from harness.predictions.training import step_memory
from harness.profilers.allocations import cpu as _cpu_memory
from harness.profilers.allocations import cuda as _cuda_memory
from harness.profilers.allocations.page import write_page
from harness.profilers.allocations.snapshot import (
    CATEGORIES,
    Allocation,
    KnownTensor,
    Mark,
    Timeline,
    keep,
    read_timeline,
    told,
)
from harness.profilers.memory import MemoryProfiler
from harness.profilers.traces.ranges import RangeTimer, ranges_on
from harness.profilers.traces.trace import PHASES
from harness.tasks.training.train_step import TrainStep
from models import accounting
from models.checkpointing import CHECKPOINTED

Tensors = list[tuple[str, str, Tensor]]
"""Category, name, tensor."""


def profile_memory(options: MemoryProfiler, case: Case, bench: Bench, program: Program) -> None:
    """Profile one step on this rank, note what it found, and write the files."""
    bench.stage("profiling")
    recorder = _Recorder(case, bench, program)
    bench.barrier()
    snapshot = recorder.record()
    bench.stage("reading the profile")
    timeline = recorder.timeline(snapshot)
    with bench.artifact(f"memory-rank{bench.rank}.snapshot.pickle").open("wb") as file:
        pickle.dump(snapshot, file)
    note = recorder.note | summarise(timeline, options)
    if isinstance(case.task, TrainStep) and case.model is not None:
        note["predicted"] = asdict(step_memory(case))
        parameter = next((tensor for _, tensor in recorder.parameters()), None)
        note["residual_stream_bytes"] = accounting.residual_stream_bytes(
            case.model,
            batch_size=case.batch_size,
            seq_len=-(-case.seq_len // case.parallel.cp),
            element_bytes=parameter.element_size() if parameter is not None else 4,
        )
    page = bench.artifact(f"memory-rank{bench.rank}.html")
    note["page_points"] = write_page(page, timeline, case.title, options.max_events)
    ranks = bench.gather(note)
    # The fullest rank decides what fits.
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank]["peak_bytes"])
    peaks = [rank["peak_bytes"] for rank in ranks]
    bench.outcome.notes["memory_profile"] = ranks[fullest] | {"peak_bytes_by_rank": peaks}


class _Recorder:
    """Runs the step, and looks at its tensors where their memory is still theirs."""

    NAMES = (*PHASES, CHECKPOINTED)

    def __init__(self, case: Case, bench: Bench, program: Program) -> None:
        self._bench = bench
        self._program = program
        self._compiled = case.attention.compiles or case.task.compiles(case)
        self._on_cuda = bench.device.type == "cuda"
        self._gradients: list[tuple[str, str, int]] = []
        self._marks: list[Mark] = []
        self.note: dict[str, Any] = {"source": bench.device.type}
        self._sizes: dict[str, int] = {}

    def record(self) -> dict[str, Any]:
        """The snapshot of one step."""
        if not self._on_cuda:
            make = torch.profiler.record_function
            snapshot, self._marks = _cpu_memory.record(lambda: self._step(make), self.NAMES)
            return snapshot
        device = self._bench.device
        marker = _cuda_memory.Marker(device, self.NAMES)
        torch.cuda.reset_peak_memory_stats(device)
        snapshot = _cuda_memory.record(lambda: self._step(marker.range), marker, device)
        self._marks = marker.marks
        stats = torch.cuda.memory_stats(device)
        self.note["counted_events"] = marker.counted
        self.note["allocator"] = {
            "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
            "peak_requested_bytes": stats["requested_bytes.all.peak"],
            "end_allocated_bytes": stats["allocated_bytes.all.current"],
            "end_requested_bytes": stats["requested_bytes.all.current"],
        }
        return snapshot

    def _step(self, make: Any) -> None:
        timer = RangeTimer(self._bench.device, make, on_end=self._phase_ended)
        with ranges_on(self._program.model, make, compiled=self._compiled):
            self._program.step(timer)

    def _phase_ended(self, phase: str) -> None:
        if phase == "backward":
            tensors: Tensors = [
                ("gradients", f"{name}.grad", parameter.grad)
                for name, parameter in self.parameters()
                if parameter.grad is not None
            ]
            # Of the last step, where it runs more than once.
            self._sizes.pop("gradients", None)
            self._gradients = self._addresses(tensors)

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Names and parameters as they are trained: of a sharded model this rank's parts."""
        trained = self._program.wrapped or self._program.model
        if trained is not None:
            for name, parameter in trained.named_parameters():
                yield name.removeprefix("module."), parameter

    def _addresses(self, tensors: Tensors) -> list[tuple[str, str, int]]:
        """Where tensors lie; adds up what they hold, each storage once."""
        seen = set()
        found = []
        for category, name, tensor in tensors:
            if tensor.device.type != self._bench.device.type:
                continue
            for address, size in storages([tensor]).items():
                if address not in seen:
                    seen.add(address)
                    found.append((category, name, address))
                    self._sizes[category] = self._sizes.get(category, 0) + size
        return found

    def timeline(self, snapshot: dict[str, Any]) -> Timeline:
        """Every allocation of the step, with its category."""
        device = self._bench.device.index or 0
        end_of_backward = max((m.end for m in self._marks if m.name == "backward"), default=0)
        known = [
            KnownTensor(category=category, name=name, address=address, at=end_of_backward)
            for category, name, address in self._gradients
        ]
        end = sum(
            entry["action"] in ("alloc", "free_requested")
            for entry in snapshot["device_traces"][device]
        )
        known += [
            KnownTensor(category=category, name=name, address=address, at=end)
            for category, name, address in self._addresses(list(self._lasting()))
        ]
        self.note["tensor_bytes"] = self._sizes
        return read_timeline(snapshot, device=device, marks=self._marks, known=known)

    def _lasting(self) -> Iterable[tuple[str, str, Tensor]]:
        """Tensors that are there before and after the step."""
        program = self._program
        if program.model is None:
            return
        names = {}
        for name, parameter in self.parameters():
            names[parameter] = name
            yield "parameters", name, parameter
        for name, buffer in program.model.named_buffers():
            yield "parameters", name, buffer
        if program.optimizer is not None:
            for parameter, state in program.optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        owner = names.get(parameter, "parameter")
                        yield "optimizer state", f"{owner} {name}", value


def summarise(timeline: Timeline, options: MemoryProfiler) -> dict[str, Any]:
    """What the record keeps of a timeline."""
    series = timeline.series()
    total = series.sum(axis=0)
    peak = int(total.argmax())
    columns = keep(series, options.points)
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
        "largest": kinds(timeline.live_at(peak))[: options.largest],
    }


def kinds(allocations: Iterable[Allocation]) -> list[dict[str, Any]]:
    """Equal allocations together, in the order of the first: those of all layers are one kind."""
    found: dict[tuple[int, str, str, tuple[str, ...]], int] = {}
    for item in allocations:
        # Of layers that are numbered.
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", item.name)
        kind = (item.size, item.category, name, tuple(told(item.frames)))
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
    """Of each column of the series, since the first event, by the host's clock."""
    times = np.asarray(timeline.times_us or [0.0])
    return np.concatenate([[0.0], times - times[0]])[: timeline.num_events + 1] / 1e3


def phase_spans(timeline: Timeline) -> list[list[Any]]:
    """[name, start_ms, end_ms] of each phase in which anything was allocated."""
    times = milliseconds(timeline)
    spans = []
    for mark in timeline.marks:
        if mark.name in PHASES and mark.end > mark.start:
            first, last = times[mark.start + 1], times[mark.end]
            spans.append([mark.name, round(float(first), 4), round(float(last), 4)])
    return spans
