"""The tools with which a task measures one case on one rank.

A task's ``run`` receives a :class:`Bench`, tells it which stage it is in, and hands it a step
to repeat; the bench warms up, times the step, and collects an :class:`Outcome`.

On CUDA, phases are timed by events without a synchronisation in between, so that timing adds no
gaps. A whole training step is timed by the host clock around a synchronised step as well (CS336
assignment 2, section 1.1.3), and on several ranks from the beginning of one step to that of the
next. On a CPU every time is the host's perf_counter.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.bench import device_time, devices, peaks
from harness.bench.compile_watch import CompileWatch
from harness.bench.host_load import LoadWatch
from harness.bench.outcome import BUSY_CPUS, Outcome, PeerFailed, PeerSilent
from harness.bench.phase_timer import PhaseTimer
from harness.statuses import STATUSES

FLUSH_BYTES = 256 * 2**20
"""Several times the L2 cache of any GPU so far (H200: 60 MB), so that no call finds its inputs
cached by the call before it."""


BUSY_ROUND_S = 1.0
"""How long a round lasts, at least, where other processes keep the CPUs busy: a scheduler gives out
turns of some milliseconds, and two threads may share one of two cores for half a second, which
makes every pass tenfold slower. Rounds of fast passes end sooner, by the next limit."""

MOST_TIMES_LONGER = 20
"""The most times as many passes as were asked for."""

AGAIN_WARM_S = 1.0
"""Warm-up in rounds after the first ends with the pass after which it has taken so long. The
processor's and the device's clocks have settled then, and a first pass loads all that is needed."""


class Bench:
    """Stages, votes between ranks, memory and timing of one case on one rank."""

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
        longer_if_busy: bool = False,
        artifacts: Path | None = None,
    ) -> None:
        """Tools for one round of a case.

        Args:
            longer_if_busy: take more passes while other processes keep the CPUs busy.
        """
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.outcome = Outcome(rank=rank)
        self.current_stage = "start"
        self._stage_began = time.perf_counter()
        self._stage_s: dict[str, float] = {}
        self.compile_watch = CompileWatch()
        self._compiled_s = 0.0
        self._vote_group = vote_group
        self._on_stage = on_stage
        self._rounds = rounds
        self._round_index = round_index
        self._longer_if_busy = longer_if_busy
        self._artifacts = artifacts
        self._baseline_rss = devices.resident_bytes()
        self._baseline_allocated = 0

    @property
    def round_index(self) -> int:
        """Which round of the case this is, from 0."""
        return self._round_index

    @property
    def in_first_round(self) -> bool:
        """Whether this is the first, or only, round of the case."""
        return self._round_index == 0

    @property
    def in_last_round(self) -> bool:
        """Whether this is the last round, whose notes the record keeps."""
        return self._round_index == self._rounds - 1

    def stage(self, name: str) -> None:
        """Announce the next stage: shown as progress, and named in an error."""
        self._end_stage()
        self.compile_watch.attach()
        self.current_stage = name
        self._on_stage(name)

    def _end_stage(self) -> None:
        now, compiled = time.perf_counter(), self.compile_watch.seconds
        spent = now - self._stage_began
        self._stage_s[self.current_stage] = self._stage_s.get(self.current_stage, 0.0) + spent
        if self.current_stage == "checking":
            # What a check's call compiles, a measured pass would have to compile otherwise.
            self.outcome.checking_s += max(0.0, spent - (compiled - self._compiled_s))
        self._stage_began, self._compiled_s = now, compiled

    def note_stages(self) -> None:
        """Record the seconds that each stage took by the host's clock."""
        self._end_stage()
        self.outcome.notes["stages_s"] = {
            name: round(spent, 3) for name, spent in self._stage_s.items()
        }

    def artifact(self, name: str) -> Path:
        """The path of a file, such as a trace, that is kept beside the case's record."""
        assert self._artifacts is not None, "a profiled case has a folder for its files"
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
        """Make all ranks start the next pass together.

        The barrier is a vote, so that a rank that failed in the last pass meets the others in
        the collective they wait in. On GPUs the streams synchronise too; otherwise a host that
        runs ahead would wait for its peers inside the timed region.
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
        """The number of ``passes`` that fall into this round of an interleaved case."""
        whole, rest = divmod(passes, self._rounds)
        return whole + (self._round_index < rest)

    def release_memory(self, *, holds_inputs: bool = False) -> None:
        """Return unused memory to the system, so that the case starts like a new process.

        On CUDA what is allocated then is the baseline of the peaks.

        Args:
            holds_inputs: the case has tensors already, and the baseline stays what it was.
        """
        if self.device.type == "cuda":
            allocated = peaks.start_afresh(self.device)
            if not holds_inputs:
                self._baseline_allocated = allocated
        else:
            gc.collect()
            devices.release_resident()

    def _start_peaks(self) -> None:
        """Reset the peaks to what is in use now."""
        if self.device.type == "cuda":
            peaks.start(self.device)
        else:
            gc.collect()
            devices.reset_peak_resident()

    def note_memory(self, *, own_bytes: int = 0, further: bool = False) -> None:
        """Record the peaks of the measured passes, without the bench's own buffers.

        Args:
            further: keep what was recorded before where it is more.
        """
        before = dict(self.outcome.memory) if further else {}
        if self.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            self.outcome.memory |= {
                "source": "cuda",
                "peak_allocated_bytes": allocated - own_bytes,
                "peak_reserved_bytes": reserved - own_bytes,
                "baseline_allocated_bytes": self._baseline_allocated,
            }
            idle = peaks.idle_graph_bytes(self.device)
            if idle:
                self.outcome.memory["idle_graph_bytes"] = idle
        else:
            peak = max(0, devices.peak_resident_bytes() - self._baseline_rss)
            self.outcome.memory |= {
                "source": "rss",
                "peak_rss_bytes": peak,
                "baseline_rss_bytes": self._baseline_rss,
            }
        for key in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes"):
            if key in before:
                self.outcome.memory[key] = max(before[key], self.outcome.memory[key])

    def add_to_peaks(self, num_bytes: int) -> None:
        """Add memory that was held throughout but that the peaks do not include."""
        for key in ("peak_allocated_bytes", "peak_reserved_bytes"):
            if key in self.outcome.memory:
                self.outcome.memory[key] += num_bytes

    def allocated_bytes(self) -> int:
        """Bytes that tensors hold on a CUDA device now; 0 on a CPU, which does not count them."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def note_before_backward(
        self,
        forward: Callable[[], torch.Tensor],
        *,
        inputs: tuple[torch.Tensor, ...],
        baseline: int,
    ) -> None:
        """Record the bytes in use between ``forward`` and its backward pass.

        On CUDA these are the allocator's bytes beyond ``baseline``; on a CPU, those of the inputs,
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
        check: Callable[[], None] | None = None,
    ) -> None:
        """Repeat ``step`` ``warmup`` times untimed, then ``passes`` times timed.

        In rounds after the first, long passes are warmed up for :data:`AGAIN_WARM_S` at most.

        Args:
            whole_step: name of a further phase, the whole step by the host clock, synchronised
                at its end. Without it, passes are queued back to back and synchronised once.
            in_a_row: time the whole step from the beginning of one pass to that of the next
                instead, since a pass may leave work that overlaps with the next one.
            flush_cache: empty the GPU's L2 before every pass, outside the timed region.
            check: looks at the results of the last pass: after the warm-up, about half way and
                after the last pass; in further rounds, which others precede, after the last alone.
                Neither its time nor its memory is measured.
        """
        timer = PhaseTimer(self.device)
        scratch = None
        if flush_cache and self.device.type == "cuda":
            scratch = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

        passes = self.share(passes)
        self.stage("warm-up")
        warm_since = time.perf_counter()
        for index in range(warmup):
            if index and self._is_warm_again(time.perf_counter() - warm_since):
                break
            self.barrier()
            started = time.perf_counter()
            step(timer)
            self.synchronize()
            if index == 0:
                self.outcome.compilation.setdefault("first_pass_s", time.perf_counter() - started)
        per_pass = len(timer.collect())
        timer.reserve(passes * per_pass)
        self.vote()

        def pause() -> None:
            """Check, and take a pass as warm as it was before."""
            assert check is not None
            self._check_results(check)
            self.stage("warm-up")
            self.barrier()
            step(PhaseTimer(self.device))
            self.synchronize()

        pauses = check is not None and self.in_first_round
        if warmup and pauses:
            pause()
        compiled_before = self.compile_watch.count
        state_before = devices.gpu_state(self.device)
        load_watch = LoadWatch(self.device)
        whole: list[float] = []
        enqueued_ms: list[float] = []
        for index, part in enumerate(_parts(passes) if pauses else [passes]):
            if index:
                pause()
            self.stage("measuring")
            self._start_peaks()
            if in_a_row:
                self.outcome.notes["in_a_row"] = True
                whole += self._time_in_a_row(step, timer, part, warm=warmup > 0)
            else:
                ends = whole_step is not None
                wholes, enqueued = self._time_apart(step, timer, part, scratch, ends=ends)
                whole += wholes
                enqueued_ms += enqueued
            self.synchronize()
            own_bytes = 0 if scratch is None else FLUSH_BYTES
            self.note_memory(own_bytes=own_bytes, further=index > 0)
        if whole_step is None and not in_a_row:
            further = self._further_passes(passes, load_watch)
            self._time_apart(step, timer, further, scratch, ends=False)

        self.outcome.device_state.setdefault("before", state_before)
        self.outcome.device_state["after"] = devices.gpu_state(self.device)
        self.outcome.load = load_watch.load()
        recompilations = self.compile_watch.count - compiled_before
        self.outcome.compilation["recompilations"] = (
            self.outcome.compilation.get("recompilations", 0) + recompilations
        )
        # Without warm-up the first measured pass is where things compile: say so, by design.
        phase_clock = "cuda_event" if self.device.type == "cuda" else "host"
        samples_ms, host_ms = timer.collect_with_host()
        for name, samples in samples_ms.items():
            self.outcome.clocks[name] = phase_clock
            self.outcome.samples_ms[name] = samples
        if whole_step is not None:
            self.outcome.clocks[whole_step] = phase_clock if in_a_row else "host"
            self.outcome.samples_ms[whole_step] = whole
        if not in_a_row:
            # In a row the launch queue was soon full, and the host waited in it.
            self.outcome.host_ms |= host_ms
            if whole_step is not None and enqueued_ms:
                self.outcome.host_ms[whole_step] = enqueued_ms
        if check is not None and passes:
            self._check_results(check)
        if whole_step is None:
            # A whole step changes what it trains: its task says when it may run again.
            self.measure_device(step, scratch=scratch)

    def _further_passes(self, passes: int, load_watch: LoadWatch) -> int:
        """How many passes to add to a round on CPUs that other processes keep busy."""
        if not (self._longer_if_busy and passes and self.device.type == "cpu"):
            return 0
        load = load_watch.load()
        if self.world_size > 1 or load["other_cpu_share"] <= BUSY_CPUS:
            return 0
        as_long = math.ceil(passes * BUSY_ROUND_S / load["seconds"])
        return min(as_long, MOST_TIMES_LONGER * passes) - passes if as_long > passes else 0

    def measure_device(
        self,
        step: Callable[[PhaseTimer], None],
        *,
        whole_step: str | None = None,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Run a few more passes, which tell the device's time from its host's; CUDA only.

        On one rank see :func:`device_time.note_device_time`. On several, the host's time alone is
        noted, by more passes where those measured were in a row.

        Args:
            whole_step: the name that ``measure`` was given. A task that gave one calls this
                itself, once it has noted what further steps would change.
            scratch: memory to write before each pass, to empty the GPU's L2.
        """
        outcome = self.outcome
        if self.device.type != "cuda" or not any(outcome.samples_ms.values()):
            return
        if self.world_size == 1:
            self.stage("timing the device alone")
            # The check gave back what the passes need.
            step(PhaseTimer(self.device))
            device_time.note_device_time(
                outcome,
                step,
                self.device,
                device_time.Spin(self.device),
                synchronize=self.synchronize,
                before_pass=lambda: None if scratch is None else scratch.zero_(),
                whole_step=whole_step,
            )
        elif outcome.notes.get("in_a_row") and whole_step is not None:
            self.stage("timing the host")
            device_time.note_host_time(
                outcome, step, self.device, wait_for_all=self._wait_for_all, whole_step=whole_step
            )

    def _wait_for_all(self) -> None:
        self.synchronize()
        self.barrier()
        self.synchronize()

    def _is_warm_again(self, seconds: float) -> bool:
        """Whether a warm-up that has taken so long is enough, on one rank in a further round."""
        # Several ranks would have to agree on it.
        return not self.in_first_round and self.world_size == 1 and seconds > AGAIN_WARM_S

    def _check_results(self, check: Callable[[], None]) -> None:
        """Check the last pass on all ranks and give back the memory that this took."""
        self.stage("checking")
        self.synchronize()
        check()
        self.vote()
        if self.device.type == "cuda":
            self.synchronize()
            torch.cuda.empty_cache()
        else:
            devices.release_resident()

    def _time_apart(
        self,
        step: Callable[[PhaseTimer], None],
        timer: PhaseTimer,
        passes: int,
        scratch: torch.Tensor | None,
        *,
        ends: bool,
    ) -> tuple[list[float], list[float]]:
        """Milliseconds of each pass by the host clock, and on CUDA until the host had enqueued it.

        None unless each pass is synchronised at its end.
        """
        whole: list[float] = []
        enqueued: list[float] = []
        for _ in range(passes):
            if scratch is not None:
                scratch.zero_()
            self.barrier()
            started = time.perf_counter()
            step(timer)
            if ends:
                enqueued.append((time.perf_counter() - started) * 1e3)
                self.synchronize()
                whole.append((time.perf_counter() - started) * 1e3)
        return whole, enqueued if self.device.type == "cuda" else []

    def _time_in_a_row(
        self, step: Callable[[PhaseTimer], None], timer: PhaseTimer, passes: int, *, warm: bool
    ) -> list[float]:
        """Milliseconds from the beginning of each pass to that of the next."""
        self.barrier()
        if warm:
            # Untimed, so that the first pass also finds work left by the one before it.
            step(PhaseTimer(self.device))
        between = PhaseTimer(self.device)
        for _ in range(passes):
            with between.phase("pass"):
                step(timer)
        # Work that the last pass leaves behind is not part of its time.
        self.synchronize()
        return between.collect()["pass"]


def _parts(passes: int) -> list[int]:
    """``passes`` in two parts, with a check between them.

    The first part is even: then the checks see passes of both parities, and a result that is
    wrong in every other pass does not slip between them.
    """
    first = passes // 4 * 2 or min(2, passes)
    return [first, passes - first] if first < passes else [first]
