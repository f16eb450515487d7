"""Tasks and the bench: work by hand-computed numbers, memory against what torch holds."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.cases.case import Case
from harness.profilers.module_ranges import RangeTimer
from harness.request.compose import compose_request
from kernels import AttentionProblem, accounting


def make_case(*arguments: str) -> Case:
    (case,) = compose_request([*arguments, "device=cpu"]).cases
    return case


ATTENTION = ("task=attention", "task.num_heads=4", "batch_size=2", "task.head_dim=16")
SHORT = ("task.warmup_steps=1", "task.measure_steps=3")


def test_attention_flops_by_hand() -> None:
    problem = AttentionProblem(
        batch_size=2,
        num_heads=4,
        num_kv_heads=2,
        q_len=32,
        kv_len=32,
        head_dim=16,
        dtype="bfloat16",
        device="cpu",
        causal=False,
        needs_grad=True,
    )
    # Two matmuls over 2 x 4 heads of 32 x 32 pairs and 16 features, 2 FLOPs each.
    assert accounting.forward_flops(problem) == 2 * 2 * (2 * 4) * 32 * 32 * 16
    assert accounting.backward_flops(problem) == 2.5 * accounting.forward_flops(problem)
    # q and o: 2*4*32*16 elements; k and v: 2*2*32*16; two bytes each; lse: 2*4*32 floats.
    assert accounting.forward_bytes(problem) == 2 * 2 * 4096 + 2 * 2 * 2048 + 4 * 256
    assert accounting.backward_bytes(problem) == 4 * 2 * 4096 + 4 * 2 * 2048 + 4 * 256


@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 8), (8, 3)])
def test_causal_pairs_are_half_the_diagonal_beside_the_square(q_len: int, kv_len: int) -> None:
    """Counted one by one; the formula leaves out half of the diagonal, as S^2 / 2 does."""
    counted = sum(
        1 for row in range(q_len) for column in range(kv_len) if column <= row + kv_len - q_len
    )
    diagonal = min(q_len, kv_len)
    assert accounting.attended_pairs(q_len, kv_len, causal=True) == counted - diagonal / 2
    assert accounting.attended_pairs(q_len, kv_len, causal=False) == q_len * kv_len


@pytest.mark.parametrize("attention", ["naive", "sdpa_flash"])
@pytest.mark.parametrize("causal", ["true", "false"])
def test_predicted_memory_is_what_autograd_keeps(attention: str, causal: str) -> None:
    case = make_case(*ATTENTION, *SHORT, f"attention={attention}", f"task.causal={causal}")
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    measured = bench.outcome.memory["before_backward_bytes"]
    predicted = sum(case.task.predicted_memory(case).values())
    # A few scalars (random state, lengths) are saved beside the tensors.
    assert measured == pytest.approx(predicted, rel=0.01)


def test_attention_task_times_both_passes_apart_and_together() -> None:
    case = make_case(*ATTENTION, *SHORT, "attention=naive", "seq_len=128")
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    samples = bench.outcome.samples_ms
    assert set(samples) == set(case.task.work(case)) == {"forward", "backward", "forward_backward"}
    assert {len(values) for values in samples.values()} == {3}
    for forward, backward, both in zip(*samples.values(), strict=True):
        total = sorted((forward, backward, both))
        assert total[2] >= total[0] + total[1]


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        ("forward", {"forward", "step"}),
        ("forward_backward", {"forward", "backward", "step"}),
        ("train_step", {"forward", "backward", "optimizer", "step"}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure"])
def test_train_step_modes(mode: str, phases: set[str], precision: str) -> None:
    keys = ("model=tiny", "model.num_layers=1", "seq_len=16", "batch_size=2")
    case = make_case(*keys, *SHORT, f"task.mode={mode}", f"precision={precision}")
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    assert set(bench.outcome.samples_ms) == set(case.task.work(case)) == phases
    # Random tokens of a vocabulary of 1,000: the loss starts near log(1000) = 6.9.
    assert 6.0 < bench.outcome.notes["loss"] < 9.0


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


def test_a_profiler_sees_phases_that_follow_each_other() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def make(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append(f"end of {name}")

    timer = RangeTimer(torch.device("cpu"), make, on_end=lambda name: seen.append(f"after {name}"))
    with timer.phases("both") as begins:
        begins("first")
        begins("second")
    assert seen == [
        *("both", "first", "end of first", "after first"),
        *("second", "end of second", "after second", "end of both", "after both"),
    ]


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
    """Of a case that says of nothing that it compiles, for which no Dynamo is imported before."""
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
