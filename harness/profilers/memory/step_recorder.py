"""Records one step of a program: the allocator's snapshot, and the tensors that it holds.

source            cuda or cpu
counted_events    allocations and frees by the allocator's own count, on CUDA
allocator         peak and end by the allocator's own count, requested and rounded, on CUDA
tensor_bytes      sizes of parameters, gradients and optimizer state
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.bench.bench import Bench
from harness.bench.program import Program
from harness.bench.step_memory import storages
from harness.cases.case import Case
from harness.profilers.memory import cpu_allocator, cuda_allocator
from harness.profilers.memory.timeline import EventSpan, KnownTensor, Timeline, read_timeline
from harness.profilers.module_ranges import RangeTimer, ranges_on
from models.checkpointing import CHECKPOINTED

Tensors = list[tuple[str, str, Tensor]]
"""Category, name, tensor."""


class StepRecorder:
    """Runs one step under the allocator's recorder, and finds out where named tensors lie.

    Gradients are looked up when the backward pass ends, the others after the step: later their
    memory may belong to other tensors.
    """

    def __init__(self, case: Case, bench: Bench, program: Program) -> None:
        self._bench = bench
        self._names = (*case.task.profiled_phases, CHECKPOINTED)
        self._program = program
        self._compiled = case.attention.compiles or case.task.compiles(case)
        self._on_cuda = bench.device.type == "cuda"
        self._gradients: list[tuple[str, str, int]] = []
        self._marks: list[EventSpan] = []
        self.note: dict[str, Any] = {"source": bench.device.type}
        """Observations beside the timeline, for the record."""
        self._sizes: dict[str, int] = {}

    def record(self) -> dict[str, Any]:
        """Run the step, and return the allocator's snapshot of it."""
        if not self._on_cuda:
            make = torch.profiler.record_function
            snapshot, self._marks = cpu_allocator.record(lambda: self._step(make), self._names)
            return snapshot
        device = self._bench.device
        marker = cuda_allocator.RangeMarker(device, self._names)
        torch.cuda.reset_peak_memory_stats(device)
        snapshot = cuda_allocator.record(lambda: self._step(marker.range), marker, device)
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
            # If the step runs twice, the last one counts.
            self._sizes.pop("gradients", None)
            self._gradients = self._addresses(tensors)

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Names and parameters as they are trained: this rank's shards of a sharded model."""
        trained = self._program.wrapped or self._program.model
        if trained is not None:
            for name, parameter in trained.named_parameters():
                yield name.removeprefix("module."), parameter

    def _addresses(self, tensors: Tensors) -> list[tuple[str, str, int]]:
        """Category, name and address of each tensor; adds up their sizes, each storage once."""
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
        """Tensors that outlive the step: parameters, buffers and optimizer state."""
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
