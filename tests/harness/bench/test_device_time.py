"""The device's time and its host's, apart: on a simulated device, and on a real one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.bench.bench import Bench
from harness.bench.device_time import (
    MOST_PASSES,
    SPIN_CYCLES_PER_MS,
    HeldTimer,
    note_device_time,
    note_host_time,
    num_held_passes,
    time_held,
)
from harness.bench.outcome import Outcome
from harness.bench.phase_timer import PhaseTimer

CUDA = torch.device("cuda")


class Machine:
    """A host that enqueues work and a device that does it in order; their times are in ms."""

    def __init__(self, queue: int = 1024) -> None:
        self.host_ms = 0.0
        self.device_ms = 0.0
        self.queue = queue
        self.pending: deque[float] = deque()
        self.held_until = 0.0
        self.holds: list[float] = []

    def launch(self, host_ms: float, device_ms: float) -> None:
        """The host takes ``host_ms`` to enqueue work of ``device_ms``; a full queue stops it."""
        self.host_ms += host_ms
        while self.pending and self.pending[0] <= self.host_ms:
            self.pending.popleft()
        if len(self.pending) >= self.queue:
            self.host_ms = self.pending.popleft()
        self.device_ms = max(self.device_ms, self.host_ms) + device_ms
        self.pending.append(self.device_ms)

    def synchronize(self) -> None:
        self.host_ms = max(self.host_ms, self.device_ms)

    def start(self, at_least_ms: float) -> None:
        self.synchronize()
        self.launch(0, at_least_ms)
        self.held_until = self.device_ms
        self.holds.append(at_least_ms)

    def is_running(self) -> bool:
        return self.host_ms < self.held_until


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = max(machine.device_ms, machine.host_ms)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.host_ms / 1e3)
    return machine


Step = Callable[[PhaseTimer], None]


def kernels(machine: Machine, number: int, host_ms: float, device_ms: float) -> Step:
    """A step of one phase, of kernels that are all alike."""

    def step(timer: PhaseTimer) -> None:
        with timer.phase("forward"):
            for _ in range(number):
                machine.launch(host_ms, device_ms)

    return step


def timed(machine: Machine, step: Step, passes: int, *, apart: bool = False) -> Outcome:
    """Passes as the bench takes them, one after the other."""
    timer = PhaseTimer(CUDA)
    for _ in range(passes):
        step(timer)
        if apart:
            machine.synchronize()
    machine.synchronize()
    outcome = Outcome(rank=0)
    outcome.samples_ms, outcome.host_ms = timer.collect_with_host()
    return outcome


def held(machine: Machine, outcome: Outcome, step: Step, **options: Any) -> dict[str, float]:
    note_device_time(outcome, step, CUDA, machine, synchronize=machine.synchronize, **options)
    return {name: min(times) for name, times in outcome.device_ms.items()}


def test_a_pass_of_a_slow_host(machine: Machine) -> None:
    step = kernels(machine, 10, 0.05, 0.01)
    outcome = timed(machine, step, 5)
    assert outcome.host_ms["forward"] == pytest.approx([0.5] * 5)
    assert outcome.samples_ms["forward"] == pytest.approx([0.51] + [0.5] * 4, abs=0.011)
    assert held(machine, outcome, step) == {"forward": pytest.approx(0.1)}


def test_a_pass_of_a_fast_host(machine: Machine) -> None:
    step = kernels(machine, 10, 0.01, 0.2)
    outcome = timed(machine, step, 5)
    assert outcome.host_ms["forward"] == pytest.approx([0.1] * 5)
    assert outcome.samples_ms["forward"][1:] == pytest.approx([2.0] * 4)
    assert held(machine, outcome, step) == {"forward": pytest.approx(2.0)}


def test_samples_and_the_host_s_times_are_of_the_same_passes(machine: Machine) -> None:
    waits = iter((0.5, 0.1, 0.3))

    def step(timer: PhaseTimer) -> None:
        with timer.phases("both") as begins:
            begins("first")
            machine.launch(next(waits), 0.01)
            begins("second")
            machine.launch(0.2, 0.01)

    outcome = timed(machine, step, 3)
    assert outcome.host_ms["first"] == pytest.approx([0.5, 0.1, 0.3])
    assert outcome.host_ms["second"] == pytest.approx([0.2] * 3)
    assert outcome.host_ms["both"] == pytest.approx([0.7, 0.3, 0.5])


def test_a_host_that_is_slower_under_the_hold_gets_a_longer_one(machine: Machine) -> None:
    step = kernels(machine, 10, 0.05, 0.01)
    outcome = timed(machine, step, 5)
    slower = kernels(machine, 10, 0.15, 0.01)
    assert held(machine, outcome, slower) == {"forward": pytest.approx(0.1)}
    assert machine.holds[:3] == pytest.approx([1.1, 2.1, 2.1])
    assert "never_held" not in outcome.notes


def test_phases_that_cannot_be_held_are_left_out(machine: Machine) -> None:
    def step(timer: PhaseTimer) -> None:
        with timer.phase("forward"):
            machine.launch(0.1, 0.05)
        with timer.phase("backward"):
            machine.launch(0.1, 0.05)
            with timer.phase("communication"):
                machine.synchronize()

    outcome = timed(machine, step, 5)
    assert held(machine, outcome, step, whole_step="step") == {"forward": pytest.approx(0.05)}
    assert outcome.notes["never_held"] == ["backward"]


def test_more_kernels_than_the_launch_queue_takes(machine: Machine) -> None:
    step = kernels(machine, 4000, 0.001, 0.002)
    outcome = timed(machine, step, 3, apart=True)
    # The full queue stops the host: its time is not its own, but less than the pass's.
    (host,) = {round(ms, 6) for ms in outcome.host_ms["forward"]}
    assert 4.0 < host < 0.8 * outcome.samples_ms["forward"][0]
    assert held(machine, outcome, step) == {}
    assert outcome.notes["never_held"] == ["forward"]


def test_a_whole_step_is_the_sum_of_its_outermost_phases(machine: Machine) -> None:
    def step(timer: PhaseTimer) -> None:
        with timer.phase("forward"):
            machine.launch(0.1, 0.01)
        with timer.phase("backward"):
            machine.launch(0.1, 0.02)
            with timer.phase("communication"):
                machine.launch(0.1, 0.04)
        machine.launch(0.3, 0)

    outcome = timed(machine, step, 5)
    found = held(machine, outcome, step, whole_step="step")
    expected = {"forward": 0.01, "backward": 0.06, "communication": 0.04, "step": 0.07}
    assert found == pytest.approx(expected)


def test_the_cache_is_emptied_before_the_hold(machine: Machine) -> None:
    calls: list[str] = []
    hold = machine.start
    machine.start = lambda ms: (calls.append("hold"), hold(ms))[1]  # type: ignore[method-assign]
    step = kernels(machine, 1, 0.01, 0.01)
    timer = HeldTimer(CUDA, machine, {"forward": 0.01})
    time_held(
        step,
        timer,
        2,
        synchronize=machine.synchronize,
        before_pass=lambda: calls.append("flush"),
    )
    assert calls == ["flush", "hold"] * 2


@pytest.mark.parametrize(
    ("pass_ms", "host_ms", "expected"),
    [(0.05, 0.05, MOST_PASSES), (10.0, 0.1, 4), (100.0, 10.0, 3), (100.0, 1.0, 1)],
)
def test_passes_cost_little(pass_ms: float, host_ms: float, expected: int) -> None:
    assert num_held_passes(pass_ms, host_ms) == expected


def test_the_host_s_time_from_idle_devices(machine: Machine) -> None:
    step = kernels(machine, 900, 0.001, 0.01)
    in_a_row = timed(machine, step, 4)
    assert max(in_a_row.host_ms["forward"]) > 5
    note_host_time(in_a_row, step, CUDA, wait_for_all=machine.synchronize, whole_step="step")
    assert in_a_row.host_ms["forward"] == pytest.approx([0.9] * 3)
    assert in_a_row.host_ms["step"] == pytest.approx([0.9] * 3)


def test_nothing_further_runs_on_a_cpu() -> None:
    bench = Bench(device=torch.device("cpu"))
    calls: list[str] = []

    def step(timer: PhaseTimer) -> None:
        calls.append(bench.current_stage)
        with timer.phase("forward"):
            pass

    bench.measure(step, warmup=1, passes=2)
    bench.measure_device(step)
    assert calls == ["warm-up", "measuring", "measuring"]
    assert bench.outcome.host_ms == bench.outcome.device_ms == {}


def work_on_the_host(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    def measured(self, work: Callable[[], object], *, passes: int = 20) -> Outcome:
        bench = Bench(device=CUDA)

        def step(timer: PhaseTimer) -> None:
            with timer.phase("forward"):
                work()

        bench.measure(step, warmup=3, passes=passes, flush_cache=True)
        assert bench.current_stage == "timing the device alone"
        return bench.outcome

    def medians(self, outcome: Outcome) -> tuple[float, float, float]:
        found = (outcome.samples_ms, outcome.host_ms, outcome.device_ms)
        sample, host, device = (float(torch.tensor(x["forward"]).median()) for x in found)
        return sample, host, device

    def test_a_device_that_waits_for_its_host(self) -> None:
        x = torch.ones(16, device=CUDA)

        def work() -> None:
            for _ in range(20):
                x.add_(1)
                work_on_the_host(20e-6)

        sample, host, device = self.medians(self.measured(work))
        assert device < 0.8 * sample
        assert host > 0.8 * sample

    def test_a_device_that_has_enough_to_do(self) -> None:
        x = torch.randn(4096, 4096, device=CUDA)
        # Others may use the GPU while one of the two times is taken, but hardly five times.
        for _ in range(5):
            outcome = self.measured(lambda: torch.mm(x, x))
            sample, host, device = self.medians(outcome)
            if device == pytest.approx(sample, rel=0.05):
                break
        assert host < 0.2 * sample
        assert device == pytest.approx(sample, rel=0.05)
        assert len(outcome.host_ms["forward"]) == len(outcome.samples_ms["forward"]) == 20

    def test_a_kernel_of_known_length(self) -> None:
        cycles = 2 * SPIN_CYCLES_PER_MS

        def work() -> None:
            torch.cuda._sleep(cycles // 2)
            # The host comes late with the second half.
            work_on_the_host(0.01)
            torch.cuda._sleep(cycles // 2)

        sample, host, device = self.medians(self.measured(work))
        assert host == pytest.approx(10, rel=0.1)
        alone, *_ = self.medians(self.measured(lambda: torch.cuda._sleep(cycles)))
        assert device == pytest.approx(alone, rel=0.05)
        # Each pass begins when the one before ends, which is late by as much.
        assert sample == pytest.approx(10, rel=0.1)

    def test_a_step_that_waits_for_its_device(self) -> None:
        x = torch.ones(16, device=CUDA)
        outcome = self.measured(lambda: x.sum().item())
        assert outcome.device_ms == {}
        assert outcome.notes["never_held"] == ["forward"]
