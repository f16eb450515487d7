"""Measuring one case on one rank: clocks, memory, compilation, and the vote between ranks.

A task's ``run`` receives a :class:`Bench`, tells it which stage it is in, and hands it a step
to repeat; the bench warms up, times, and collects an :class:`Outcome`.

Time on CUDA comes from events recorded around each phase, without a synchronisation in
between, so that timing does not add gaps; a whole training step is timed by the host clock
around a synchronised step as well (CS336 assignment 2, section 1.1.3), and on several ranks from
the beginning of one to that of the next. On a CPU all are the host's perf_counter.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.bench import devices
from harness.statuses import STATUSES

# Several times the L2 cache of any GPU so far (H200: 60 MB), so that no call finds its
# inputs cached by the call before it.
FLUSH_BYTES = 256 * 2**20


class PeerFailed(Exception):
    """Another rank of this case failed; its own outcome says how."""


class PeerSilent(Exception):
    """Another rank did not answer a vote in time: it is stuck or gone."""


class WrongResult(Exception):
    """The numeric check failed; the message says by how much."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one rank observed of one case; becomes part of a record."""

    rank: int
    status: str = "ok"
    error: dict[str, Any] | None = None
    clocks: dict[str, str] = field(default_factory=dict)
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    check: dict[str, Any] | None = None
    compilation: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    device_state: dict[str, Any] = field(default_factory=dict)


class PhaseTimer:
    """Times named phases of a step; see :meth:`phase` and :meth:`phases`.

    Events are made beforehand (:meth:`reserve`) and used again: making one takes the host as long
    as launching a kernel, inside of what is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        """Name, and the moments of its start and end."""
        self._spare: list[Any] = []
        self._recorded: list[Any] = []

    def reserve(self, num_phases: int) -> None:
        """Have events for so many phases more."""
        if not self._on_cuda:
            return
        while len(self._spare) < 2 * num_phases:
            event = torch.cuda.Event(enable_timing=True)
            # CUDA makes it when it is first recorded.
            event.record()
            self._spare.append(event)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside, on the device's stream, is one sample of phase ``name``."""
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    @contextlib.contextmanager
    def phases(self, whole: str) -> Iterator[Callable[[str], None]]:
        """Phases that follow each other, each from where its name is told, and all as ``whole``.

        Where one begins the one before ends: both are one event, and a host for which a GPU waits
        has half as many to record.
        """
        began: list[tuple[str, Any]] = []

        def begins(name: str) -> None:
            began.append((name, self._now()))

        yield begins
        end = self._now()
        ends = [*(start for _, start in began[1:]), end]
        for (name, start), stop in zip(began, ends, strict=True):
            self._spans.append((name, start, stop))
        self._spans.append((whole, began[0][1], end))

    def _now(self) -> Any:
        """An event on the device's stream, or on a CPU the time."""
        if not self._on_cuda:
            return time.perf_counter()
        if not self._spare:
            self.reserve(1)
        event = self._spare.pop()
        event.record()
        self._recorded.append(event)
        return event

    def collect(self) -> dict[str, list[float]]:
        """Milliseconds of every sample by phase, in order. Call after a synchronisation."""
        samples: dict[str, list[float]] = {}
        for name, start, end in self._spans:
            elapsed = start.elapsed_time(end) if self._on_cuda else (end - start) * 1e3
            samples.setdefault(name, []).append(elapsed)
        self._spans.clear()
        self._spare += self._recorded
        self._recorded.clear()
        return samples


class CompileWatch:
    """Counts torch.compile's compilations and the time they take, from Dynamo's callbacks.

    And the time that our own kernels spend on trying configurations, which they count. Dynamo
    takes as long to import as torch: who is to compile something imports it before, and where
    nothing has, nothing is compiled.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        self.autotune_seconds = 0.0
        self._started = 0.0
        self._watching = False
        self._callbacks: Any = None

    def start(self, event: Any) -> None:
        self._started = time.perf_counter()
        if event.callback_trigger.name in ("DYNAMO", "LAZY_BACKWARD"):
            self.count += 1

    def end(self, event: Any) -> None:
        self.seconds += time.perf_counter() - self._started

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        tuned_before = _autotune_seconds()
        self._watching = True
        self.attach()
        try:
            yield
        finally:
            self._watching = False
            if self._callbacks is not None:
                self._callbacks.remove_start_callback(self.start)
                self._callbacks.remove_end_callback(self.end)
                self._callbacks = None
            self.autotune_seconds += _autotune_seconds() - tuned_before

    def attach(self) -> None:
        """Hear Dynamo, if it is watched and has been imported by now."""
        dynamo = sys.modules.get("torch._dynamo.callback")
        if self._watching and self._callbacks is None and dynamo is not None:
            self._callbacks = dynamo.callback_handler
            self._callbacks.register_start_callback(self.start)
            self._callbacks.register_end_callback(self.end)


def _autotune_seconds() -> float:
    """What kernels.flash has spent on autotuning in this process; 0 while nothing has used it."""
    configs = sys.modules.get("kernels.flash.any_gpu.configs")
    return configs.autotune_seconds() if configs is not None else 0.0


class Bench:
    """One rank's tools for measuring one case."""

    def __init__(
        self,
        *,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        vote_group: dist.ProcessGroup | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
        rounds: int = 1,
        round_index: int = 0,
        artifacts: Path | None = None,
    ) -> None:
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.outcome = Outcome(rank=rank)
        self.current_stage = "start"
        self._stage_began = time.perf_counter()
        self._stage_s: dict[str, float] = {}
        self.compile_watch = CompileWatch()
        self._vote_group = vote_group
        self._on_stage = on_stage
        self._rounds = rounds
        self._round_index = round_index
        self._artifacts = artifacts
        self._baseline_rss = devices.resident_bytes()

    @property
    def in_first_round(self) -> bool:
        """Whether this is the first, or only, turn of a case that takes turns with others."""
        return self._round_index == 0

    @property
    def in_last_round(self) -> bool:
        """Whether notes of this round are the ones that a record keeps."""
        return self._round_index == self._rounds - 1

    def stage(self, name: str) -> None:
        """Say what happens next: shown as progress, and named in an error."""
        self._end_stage()
        self.compile_watch.attach()
        self.current_stage = name
        self._on_stage(name)

    def _end_stage(self) -> None:
        now = time.perf_counter()
        spent = self._stage_s.get(self.current_stage, 0.0) + now - self._stage_began
        self._stage_s[self.current_stage], self._stage_began = spent, now

    def note_stages(self) -> None:
        """Record the seconds of each stage by the host's clock: where the time of a case goes."""
        self._end_stage()
        self.outcome.notes["stages_s"] = {
            name: round(spent, 3) for name, spent in self._stage_s.items()
        }

    def artifact(self, name: str) -> Path:
        """Where a file called ``name`` goes that stays beside the case's record."""
        assert self._artifacts is not None, "who profiles says where its files go"
        self._artifacts.mkdir(parents=True, exist_ok=True)
        return self._artifacts / name

    def vote(self, status: str = "ok") -> None:
        """Agree with the other ranks before a stage that needs them all.

        Raises PeerFailed if any rank votes worse than ok, PeerSilent if one does not answer.
        """
        if self.world_size == 1:
            return
        code = torch.tensor([STATUSES.index(status)])
        try:
            dist.all_reduce(code, op=dist.ReduceOp.MAX, group=self._vote_group)
        except RuntimeError as error:
            raise PeerSilent(str(error)) from error
        worst = STATUSES[int(code)]
        if worst != "ok":
            raise PeerFailed(f"another rank voted {worst}")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """All ranks start the next pass together.

        A vote, so that a rank which failed in the last pass meets the others in one and the
        same collective, wherever they wait for it. On GPUs the streams are brought together
        too: a host that runs ahead would else begin to wait for its peers inside the timing.
        """
        self.vote()
        if self.world_size > 1 and self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device))

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order; all ranks call it together."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(gathered, value, group=self._vote_group)
        except RuntimeError as error:
            raise PeerSilent(str(error)) from error
        return gathered

    def share(self, passes: int) -> int:
        """This round's part of ``passes``, when measuring is split into interleaved rounds."""
        whole, rest = divmod(passes, self._rounds)
        return whole + (self._round_index < rest)

    def release_memory(self) -> None:
        """Give back what nothing uses any more, so that set-up starts like a new process."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        else:
            devices.release_resident()

    def _start_peaks(self) -> None:
        """Forget peaks so far; what is allocated now stays counted.

        Releases nothing: the first pass would pay for taking the memory again.
        """
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            devices.reset_peak_resident()

    def note_memory(self, *, own_bytes: int = 0) -> None:
        """Record the peaks of the measured passes, without the bench's own buffers."""
        if self.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            self.outcome.memory |= {
                "source": "cuda",
                "peak_allocated_bytes": allocated - own_bytes,
                "peak_reserved_bytes": reserved - own_bytes,
            }
        else:
            peak = max(0, devices.peak_resident_bytes() - self._baseline_rss)
            self.outcome.memory |= {
                "source": "rss",
                "peak_rss_bytes": peak,
                "baseline_rss_bytes": self._baseline_rss,
            }

    def add_to_peaks(self, num_bytes: int) -> None:
        """Count memory that was held throughout and that the peaks do not know of."""
        for key in ("peak_allocated_bytes", "peak_reserved_bytes"):
            if key in self.outcome.memory:
                self.outcome.memory[key] += num_bytes

    def add_temporaries(self, num_bytes: int) -> None:
        """Count what a CUDA graph uses inside, for which the device's memory is held anyway."""
        if "peak_allocated_bytes" in self.outcome.memory:
            self.outcome.memory["peak_allocated_bytes"] += num_bytes

    def allocated_bytes(self) -> int:
        """Bytes that tensors hold on a CUDA device now; 0 on a CPU, which keeps no count."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def note_before_backward(
        self,
        forward: Callable[[], torch.Tensor],
        *,
        inputs: tuple[torch.Tensor, ...],
        baseline: int,
    ) -> None:
        """Record the bytes in use between ``forward`` and its backward pass.

        On CUDA what the allocator holds beyond ``baseline``; on a CPU the sizes of the inputs,
        the output and the tensors that autograd saves, each storage counted once.
        """
        if self.device.type == "cuda":
            output = forward()
            self.synchronize()
            in_use = self.allocated_bytes() - baseline
        else:
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in inputs}

            def pack(x: torch.Tensor) -> torch.Tensor:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                output = forward()
            storages[output.untyped_storage().data_ptr()] = output.untyped_storage()
            in_use = sum(storage.nbytes() for storage in storages.values())
        self.outcome.memory["before_backward_bytes"] = in_use

    def measure(
        self,
        step: Callable[[PhaseTimer], None],
        *,
        warmup: int,
        passes: int,
        whole_step: str | None = None,
        in_a_row: bool = False,
        flush_cache: bool = False,
    ) -> None:
        """Repeat ``step`` ``warmup`` times untimed, then ``passes`` times timed.

        ``whole_step`` names a further phase: the whole step by the host clock, synchronised at
        its end. ``in_a_row`` times it from the beginning of one pass to that of the next instead:
        a pass may leave to the next one what hides behind it, and pays for what the one before
        has left. ``flush_cache`` empties the GPU's L2 before every pass, outside the timing;
        without ``whole_step`` passes are queued back to back and synchronised once, so that
        launch latency hides behind the flush.
        """
        timer = PhaseTimer(self.device)
        scratch = None
        if flush_cache and self.device.type == "cuda":
            scratch = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

        passes = self.share(passes)
        self.stage("warm-up")
        for index in range(warmup):
            self.barrier()
            started = time.perf_counter()
            step(timer)
            self.synchronize()
            if index == 0:
                self.outcome.compilation.setdefault("first_pass_s", time.perf_counter() - started)
        per_pass = len(timer.collect())
        timer.reserve(passes * per_pass)
        self.vote()

        self.stage("measuring")
        compiled_before = self.compile_watch.count
        state_before = devices.gpu_state(self.device)
        self._start_peaks()
        if in_a_row:
            self.outcome.notes["in_a_row"] = True
            whole = self._time_in_a_row(step, timer, passes, warm=warmup > 0)
        else:
            whole = self._time_apart(step, timer, passes, scratch, ends=whole_step is not None)
        self.synchronize()

        self.note_memory(own_bytes=0 if scratch is None else FLUSH_BYTES)
        self.outcome.device_state.setdefault("before", state_before)
        self.outcome.device_state["after"] = devices.gpu_state(self.device)
        recompilations = self.compile_watch.count - compiled_before
        self.outcome.compilation["recompilations"] = (
            self.outcome.compilation.get("recompilations", 0) + recompilations
        )
        # Without warm-up the first measured pass is where things compile: say so, by design.
        phase_clock = "cuda_event" if self.device.type == "cuda" else "host"
        for name, samples in timer.collect().items():
            self.outcome.clocks[name] = phase_clock
            self.outcome.samples_ms[name] = samples
        if whole_step is not None:
            self.outcome.clocks[whole_step] = phase_clock if in_a_row else "host"
            self.outcome.samples_ms[whole_step] = whole

    def _time_apart(
        self,
        step: Callable[[PhaseTimer], None],
        timer: PhaseTimer,
        passes: int,
        scratch: torch.Tensor | None,
        *,
        ends: bool,
    ) -> list[float]:
        """Milliseconds of each pass, if each is to end before the next begins; else none."""
        whole = []
        for _ in range(passes):
            if scratch is not None:
                scratch.zero_()
            self.barrier()
            started = time.perf_counter()
            step(timer)
            if ends:
                self.synchronize()
                whole.append((time.perf_counter() - started) * 1e3)
        return whole

    def _time_in_a_row(
        self, step: Callable[[PhaseTimer], None], timer: PhaseTimer, passes: int, *, warm: bool
    ) -> list[float]:
        """Milliseconds from the beginning of each pass to that of the next."""
        self.barrier()
        if warm:
            # Not timed: it leaves to the first what every pass leaves to the next.
            step(PhaseTimer(self.device))
        between = PhaseTimer(self.device)
        for _ in range(passes):
            with between.phase("pass"):
                step(timer)
        # What the last pass leaves to one that does not come is not its own.
        self.synchronize()
        return between.collect()["pass"]
