"""The bench: clocks, phases, rounds, compilations, launches and the device's own rates."""

from __future__ import annotations

import importlib
import sys
import time

import pytest
import torch

from harness.bench import devices
from harness.bench.bench import Bench
from harness.bench.copy_bandwidth import COPY_BYTES, copy_bandwidth_gb_s, measured_gb_s
from harness.bench.launches import count_launches
from harness.bench.matmul_rate import MATMUL_SIZE, matmul_tflops, measured_tflops
from harness.bench.outcome import WrongResult
from harness.bench.phase_timer import PhaseTimer


@pytest.mark.parametrize(("passes", "rounds"), [(10, 1), (10, 2), (10, 3), (2, 5)])
def test_rounds_share_all_passes(passes: int, rounds: int) -> None:
    shares = [
        Bench(device=torch.device("cpu"), rounds=rounds, round_index=index).share(passes)
        for index in range(rounds)
    ]
    assert sum(shares) == passes
    assert max(shares) - min(shares) <= 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose time passes only while it sleeps."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)


@pytest.mark.usefixtures("clock")
def test_the_timer_reads_milliseconds_and_nests() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with timer.phase("outer"):
        with timer.phase("inner"):
            time.sleep(0.02)
        time.sleep(0.02)
    samples = timer.collect()
    assert samples == {"inner": [pytest.approx(20)], "outer": [pytest.approx(40)]}
    assert timer.collect() == {}


@pytest.mark.usefixtures("clock")
def test_phases_that_follow_each_other() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with timer.phases("both") as begins:
        begins("first")
        time.sleep(0.01)
        begins("second")
        time.sleep(0.03)
    samples = {name: values[0] for name, values in timer.collect().items()}
    assert samples == pytest.approx({"first": 10, "second": 30, "both": 40})


def test_events_are_made_before_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        made = 0
        clock = 0

        def __init__(self, enable_timing: bool) -> None:
            Event.made += 1

        def record(self) -> None:
            Event.clock += 1
            self.at = Event.clock

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = PhaseTimer(torch.device("cuda"))
    timer.reserve(2)
    assert Event.made == 4
    for _ in range(2):
        with timer.phase("outer"), timer.phase("inner"):
            pass
        # A tick between two marks that follow each other, three around the inner pair.
        assert timer.collect() == {"outer": [3], "inner": [1]}
    assert Event.made == 4
    with timer.phase("a"), timer.phase("b"), timer.phase("c"):
        pass
    assert set(timer.collect()) == {"a", "b", "c"}
    assert Event.made == 6
    for _ in range(2):
        with timer.phases("both") as begins:
            begins("first")
            begins("second")
        # Three ticks for six moments.
        assert timer.collect() == {"first": [1], "second": [1], "both": [2]}
    assert Event.made == 6


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("round_index", "pass_s", "expected"),
    [(0, 0.6, 5), (1, 0.6, 2), (1, 3.0, 1), (1, 0.01, 5)],
)
def test_a_further_round_warms_up_for_a_second(
    round_index: int, pass_s: float, expected: int
) -> None:
    bench = Bench(device=torch.device("cpu"), rounds=5, round_index=round_index)
    taken = []

    def step(timer: PhaseTimer) -> None:
        taken.append(bench.current_stage)
        time.sleep(pass_s)

    bench.measure(step, warmup=5, passes=5)
    assert taken.count("warm-up") == expected
    assert taken.count("measuring") == 1


@pytest.mark.usefixtures("clock")
def test_each_stage_is_noted_with_its_seconds() -> None:
    bench = Bench(device=torch.device("cpu"))
    bench.stage("set-up")
    time.sleep(0.02)
    bench.measure(lambda timer: time.sleep(0.01), warmup=2, passes=3)
    bench.stage("set-up")
    time.sleep(0.02)
    bench.note_stages()
    stages = bench.outcome.notes["stages_s"]
    # Two times in set-up add up.
    expected = {"start": 0.0, "set-up": 0.04, "warm-up": 0.02, "measuring": 0.03}
    assert list(stages) == list(expected)
    assert stages == pytest.approx(expected)


def test_warm_up_is_not_measured_and_the_window_is() -> None:
    bench = Bench(device=torch.device("cpu"))
    calls = []

    def step(timer: PhaseTimer) -> None:
        calls.append(bench.current_stage)
        with timer.phase("work"):
            pass

    bench.measure(step, warmup=2, passes=3, whole_step="step")
    assert calls == ["warm-up"] * 2 + ["measuring"] * 3
    assert len(bench.outcome.samples_ms["work"]) == len(bench.outcome.samples_ms["step"]) == 3


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("warmup", "untimed"), [(2, 1), (0, 0)])
def test_passes_in_a_row_pay_for_what_the_one_before_has_left(warmup: int, untimed: int) -> None:
    """Each leaves 20 ms to the next; without warm-up nothing may run before the first."""
    bench = Bench(device=torch.device("cpu"))
    calls, left = [], [0.0]

    def step(timer: PhaseTimer) -> None:
        calls.append(bench.current_stage)
        time.sleep(left.pop())
        with timer.phase("work"):
            left.append(0.02)

    bench.measure(step, warmup=warmup, passes=3, whole_step="step", in_a_row=True)
    assert calls == ["warm-up"] * warmup + ["measuring"] * (untimed + 3)
    assert bench.outcome.notes["in_a_row"]
    steps = bench.outcome.samples_ms["step"]
    assert len(steps) == len(bench.outcome.samples_ms["work"]) == 3
    assert steps == pytest.approx([20 if warmup else 0, 20, 20])


def test_a_compilation_inside_the_window_is_counted() -> None:
    bench = Bench(device=torch.device("cpu"))
    function = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    sizes = iter([3, 3, 3, 5])

    def step(timer: PhaseTimer) -> None:
        with timer.phase("work"):
            function(torch.ones(next(sizes)))

    with bench.compile_watch.watching():
        bench.measure(step, warmup=2, passes=2)
    assert bench.compile_watch.count == 2
    assert bench.outcome.compilation["recompilations"] == 1


def test_a_compilation_by_what_was_imported_meanwhile_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compilations of a case that does not declare any, so that Dynamo is imported late."""
    callbacks = importlib.import_module("torch._dynamo.callback")
    monkeypatch.delitem(sys.modules, "torch._dynamo.callback")
    function = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    sizes = iter([3, 5])

    def step(timer: PhaseTimer) -> None:
        with timer.phase("work"):
            function(torch.ones(next(sizes)))
        sys.modules["torch._dynamo.callback"] = callbacks

    bench = Bench(device=torch.device("cpu"))
    with bench.compile_watch.watching():
        bench.measure(step, warmup=1, passes=1)
        assert bench.outcome.compilation["recompilations"] == 1
        assert bench.compile_watch.count == 1
    function(torch.ones(7))
    assert bench.compile_watch.count == 1, "hears nothing after the case"


def test_operators_of_a_step_are_counted() -> None:
    x = torch.randn(4)
    counted = count_launches(lambda: x.sin().cos(), torch.device("cpu"))
    assert counted == {"unit": "operator", "kernels": 2.0, "launches": 2.0}


def test_the_copy_bandwidth_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COPY_BYTES, "cpu", 2**20)
    measured_gb_s.cache_clear()
    bench = Bench(device=torch.device("cpu"))
    first = copy_bandwidth_gb_s(bench)
    monkeypatch.setitem(COPY_BYTES, "cpu", 2**10)
    assert copy_bandwidth_gb_s(bench) == first > 0


def test_the_matmul_rate_is_measured_once_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MATMUL_SIZE, "cpu", 256)
    measured_tflops.cache_clear()
    bench = Bench(device=torch.device("cpu"))
    first = matmul_tflops(bench, "float32")
    monkeypatch.setitem(MATMUL_SIZE, "cpu", 64)
    assert matmul_tflops(bench, "float32") == first > 0
    assert matmul_tflops(bench, "float64") != first


class TestChecksBetweenPasses:
    @pytest.mark.usefixtures("clock")
    @pytest.mark.parametrize("in_a_row", [False, True])
    def test_before_between_and_after_and_outside_the_times(self, in_a_row: bool) -> None:
        bench = Bench(device=torch.device("cpu"))
        events: list[str] = []

        def step(timer: PhaseTimer) -> None:
            events.append(bench.current_stage)
            with timer.phase("work"):
                time.sleep(0.01)

        def check() -> None:
            assert bench.current_stage == "checking"
            events.append("check")
            time.sleep(1)

        bench.measure(step, warmup=2, passes=6, whole_step="step", in_a_row=in_a_row, check=check)
        again = ["warm-up"] + ["measuring"] * in_a_row
        expected = [*["warm-up"] * 2, "check", *again, *["measuring"] * 2]
        expected += ["check", *again, *["measuring"] * 4, "check"]
        assert events == expected
        for name in ("work", "step"):
            assert bench.outcome.samples_ms[name] == pytest.approx([10] * 6)

    @pytest.mark.usefixtures("clock")
    @pytest.mark.parametrize(("round_index", "checks"), [(0, 3), (1, 1), (2, 1)])
    def test_further_rounds_are_checked_after_their_last_pass(
        self, round_index: int, checks: int
    ) -> None:
        bench = Bench(device=torch.device("cpu"), rounds=3, round_index=round_index)
        events: list[str] = []

        def step(timer: PhaseTimer) -> None:
            events.append(bench.current_stage)
            with timer.phase("work"):
                time.sleep(0.01)

        def check() -> None:
            events.append("check")
            time.sleep(1)

        bench.measure(step, warmup=2, passes=18, check=check)
        bench.note_stages()
        assert events.count("check") == checks
        assert events[-1] == "check"
        assert bench.outcome.checking_s == pytest.approx(checks)

    @pytest.mark.parametrize("warmup", [1, 2, 5])
    @pytest.mark.parametrize("passes", [2, 3, 4, 5, 6, 10, 100])
    def test_see_passes_of_both_parities(self, warmup: int, passes: int) -> None:
        """Counted from the first call, whatever the numbers of passes."""
        bench = Bench(device=torch.device("cpu"))
        calls, seen = [0], set()

        def step(timer: PhaseTimer) -> None:
            calls[0] += 1

        bench.measure(step, warmup=warmup, passes=passes, check=lambda: seen.add(calls[0] % 2))
        assert seen == {0, 1}

    def test_a_peak_of_either_part_counts_and_that_of_the_check_does_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Bench(device=torch.device("cpu"))
        peak, steps = [0], iter([50, 50, 70, 20, 20, 20, 20])

        def step(timer: PhaseTimer) -> None:
            peak[0] = max(peak[0], next(steps))

        def reset() -> None:
            peak[0] = 0

        monkeypatch.setattr(devices, "reset_peak_resident", reset)
        monkeypatch.setattr(devices, "peak_resident_bytes", lambda: bench._baseline_rss + peak[0])

        def check() -> None:
            peak[0] = 1_000

        bench.measure(step, warmup=1, passes=4, check=check)
        assert bench.outcome.memory["peak_rss_bytes"] == 70

    def test_nothing_is_measured_after_a_wrong_result(self) -> None:
        bench = Bench(device=torch.device("cpu"))
        calls = []

        def check() -> None:
            raise WrongResult("no")

        with pytest.raises(WrongResult):
            bench.measure(lambda timer: calls.append(1), warmup=1, passes=4, check=check)
        assert len(calls) == 1
        assert bench.outcome.samples_ms == {}


class TestBusyRounds:
    """A round on CPUs that others keep busy lasts longer."""

    @staticmethod
    def num_passes(monkeypatch: pytest.MonkeyPatch, *, others: float, **options: bool) -> int:
        """The passes of 10 ms of a round in which others used a share of the CPUs."""
        monkeypatch.setattr(
            "harness.bench.bench.LoadWatch.load",
            lambda self: {"other_cpu_share": others, "seconds": 0.1},
        )
        bench = Bench(device=torch.device("cpu"), **options)

        def step(timer: PhaseTimer) -> None:
            with timer.phase("forward"):
                time.sleep(0.01)

        bench.measure(step, warmup=1, passes=10)
        return len(bench.outcome.samples_ms["forward"])

    @pytest.mark.usefixtures("clock")
    @pytest.mark.parametrize(("others", "longer", "expected"), [(0.5, True, 100), (0.05, True, 10)])
    def test_until_decided(
        self, others: float, longer: bool, expected: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.num_passes(monkeypatch, others=others, longer_if_busy=longer) == expected

    @pytest.mark.usefixtures("clock")
    def test_not_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.num_passes(monkeypatch, others=0.5) == 10
