"""The contest of the best few: who drops out when, and who is left."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_workers import Bench, Listener, stand_in
from records import make_record

from harness.cases.case import Case
from harness.recommend import measuring
from harness.recommend.combination import Combination
from harness.recommend.contest import Contest
from harness.request.grid import Parts
from harness.run.children.reply import Reply
from harness.run.rounds.case_group import CaseGroup
from harness.run.rounds.options import RunOptions
from harness.run.rounds.record_builder import RecordBuilder
from harness.run.runner import Runner
from harness.store.record import Round


class Run:
    """Rounds of a case that take a fixed time with a fixed noise."""

    def __init__(self, case: Case, ms: float, rounds: int, noise: float) -> None:
        self.case = case
        self.ms = ms
        self.noise = noise
        self.ended = self.recorded = False
        self.num_finished = rounds
        self.last_wall_s = 1.0
        self.again_s = 0.1
        self.is_taken_up = False

    @property
    def processes(self) -> list[int]:
        return list(range(self.num_finished))

    def loads(self) -> list[dict[str, float]]:
        return []

    def rounds_ms(self, phase: str) -> list[list[float]]:
        swings = (-1.0, 0.3, 1.0, -0.4, 0.1)
        return [
            [self.ms * (1 + self.noise * swings[(index * self.case.batch_size) % 5])] * 2
            for index in range(self.num_finished)
        ]


@pytest.fixture
def cases() -> list[Case]:
    point = {"task": "train_step", "model": "tiny", "attention": "sdpa", "seq_len": 64}
    first = Parts().case(point, "cpu")
    return [replace(first, batch_size=size) for size in (1, 2, 4)]


def contest(
    cases: list[Case], times_ms: list[float], rounds: int = 5, noise: float = 0.001
) -> Contest:
    """A batch of 4 sequences: 4, 2 and 1 micro-batches."""
    options = RunOptions(results=Path(), interleave=5, until_decided=True)
    made = Contest(cases, options, {case.id: 4 // case.batch_size for case in cases})
    for case, ms in zip(cases, times_ms, strict=True):
        made.runs[case.id] = Run(case, ms, rounds, noise)  # type: ignore[assignment]
    return made


def test_batches_are_compared_and_not_micro_batches(cases: list[Case]) -> None:
    """10 ms four times are slower than 19 twice, and these than 36 once."""
    made = contest(cases, [10.0, 19.0, 36.0])
    made.look()
    assert not made.is_open
    stopped = {run.case.batch_size: made.why_stopped(run, 9) for run in made.closed()}
    assert set(stopped) == {1, 2, 4}
    assert stopped[1] == stopped[2] == "decided after 5 rounds"
    assert made._slower == {cases[0].id, cases[1].id}


def test_those_that_are_not_told_apart_get_more_rounds(cases: list[Case]) -> None:
    """2% apart under noise of 2% is open; 30% is not."""
    made = contest(cases, [13.0, 10.2 * 2, 40.0], noise=0.02)
    made.look()
    assert made.is_open
    assert [run.case.batch_size for run in made.closed()] == [1]
    assert list(made.rounds_to_look()) == [5, 6]
    made.give_up()
    assert not made.is_open


def test_equal_ones_are_tied(cases: list[Case]) -> None:
    made = contest(cases, [10.0, 20.0, 40.0])
    made.look()
    assert not made.is_open
    assert not made._slower


def measured(case: Case, step_ms: float, at: str, process: int) -> Combination:
    """Five rounds of two steps, of one process, that began in a minute."""
    times = [step_ms * (1 + 1e-4 * index) for index in range(10)]
    began = [f"2026-01-02T03:{at}:0{index}+00:00" for index in range(5)]
    record = make_record(samples_ms={"step": [times]}, device=case.device)
    record.rounds = [2] * 5
    record.notes["rounds_started_at"] = began
    record.round_states = [Round(started_at=text, process=process) for text in began]
    return Combination(base=case, accumulation=1, record=record)


@pytest.mark.parametrize(
    ("at", "process", "verdict"),
    [
        ("04", 1, "SLOWER"),
        # Another run, whose process may be slower than this by more than its rounds differ.
        ("44", 2, "UNCLEAR"),
    ],
)
def test_one_process_says_little_of_another(
    cases: list[Case], at: str, process: int, verdict: str
) -> None:
    case = replace(cases[0], device="cuda")
    best = measured(case, 100.0, "04", 1)
    assert measuring.standing(best, measured(case, 101.5, at, process)) == verdict
    assert measuring.standing(best, measured(case, 140.0, at, process)) == "SLOWER"


def test_no_verdict_before_the_first_look(cases: list[Case]) -> None:
    made = contest(cases, [10.0, 30.0, 40.0], rounds=2)
    made.look()
    assert made.is_open


@pytest.mark.parametrize(("verdict", "first"), [("SAME", "launched"), ("SLOWER", "captured")])
def test_launched_is_recommended_where_captured_is_the_same(
    cases: list[Case], verdict: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "standing", lambda best, other: verdict)
    task: Any = cases[0].task
    captured = replace(cases[0], task=replace(task, cuda_graph=True))
    ranked = [Combination(base=case, accumulation=1) for case in (captured, *cases[:2])]
    found = measuring.launched_first(ranked)
    assert found[0].is_captured == (first == "captured")
    assert sorted(map(id, found)) == sorted(map(id, ranked))
    assert measuring.launched_first(ranked[1:]) == ranked[1:]


@pytest.mark.parametrize(
    ("left_s", "added_s", "start_s", "fresh", "rounds", "reason"),
    [
        (9999.0, 9999.0, 0.0, None, 14, "14 rounds, the most allowed: 1 pair UNCLEAR"),
        (-1.0, 9999.0, 0.0, None, 5, "time budget of 120 s, after 5 rounds: 1 pair UNCLEAR"),
        # There is time for two rounds, and not for the workers that measure them.
        (999.0, 9999.0, 600.0, None, 5, "time budget of 120 s, after 5 rounds: 1 pair UNCLEAR"),
        # They go on.
        (999.0, 9999.0, 600.0, False, 14, "14 rounds, the most allowed: 1 pair UNCLEAR"),
        # The time for added rounds is over first, and is the one that is named.
        (9999.0, 0.0, 0.0, None, 5, "time budget of 0 s, after 5 rounds: 1 pair UNCLEAR"),
    ],
)
def test_rounds_are_added_while_there_is_time(
    left_s: float,
    added_s: float,
    start_s: float,
    fresh: bool | None,
    rounds: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one_group(cases: list[Case], options: RunOptions) -> list[CaseGroup]:
        once = {case.id: 1 for case in cases}
        return [Contest(cases, options, once, time.monotonic() + left_s, 120.0)]

    host = stand_in(monkeypatch)
    # As equal as can be, with 8% from round to round.
    host.times = lambda turn: [1 + random.Random(f"{turn}").gauss(0.0, 0.08)] * 2
    bench = Bench(tmp_path)
    options = RunOptions(
        results=tmp_path,
        interleave=5,
        fresh_rounds=fresh,
        until_decided=True,
        budget_s=added_s,
        max_rounds=14,
    )
    runner = Runner(options, bench.store, Listener(), grouping=one_group)
    host.at["sdpa", 4] = lambda: setattr(runner._workers, "start_s", start_s)
    runner.run(bench.cases)
    assert len(host.turns) == 2 * rounds
    assert {record.stopped for record in bench.records().values()} == {reason}


@pytest.mark.parametrize(
    ("left_s", "taken_up", "kept"),
    [
        # Four rounds of 0.1 s for each case.
        (1.3, False, {1, 2, 4}),
        (1.1, False, {2, 4}),
        (-99.0, False, {2, 4}),
        # The processes are new, and compile for 0.9 s.
        (4.0, True, {1, 2, 4}),
        (3.8, True, {2, 4}),
    ],
)
def test_the_slowest_of_a_round_are_left_out_where_time_is_short(
    cases: list[Case], left_s: float, taken_up: bool, kept: set[int]
) -> None:
    made = contest(cases, [13.0, 20.2, 40.0], rounds=1)
    for run in made.runs.values():
        run.is_taken_up = taken_up  # type: ignore[misc]
    made._ends_s = time.monotonic() + left_s
    left_out = made.before_second_round()
    assert {run.case.batch_size for run in made.runs.values()} == kept
    assert {case.batch_size for case in left_out} == {1, 2, 4} - kept


def test_further_rounds_neither_compile_nor_check(cases: list[Case]) -> None:
    run = RecordBuilder(cases[0], 5)
    for first_pass_s, checking_s, again_s in ((3.0, 24.0, 9.0), (0.5, 0.0, 35.5)):
        outcome = {"rank": 0, "status": "ok", "error": None, "checking_s": checking_s}
        outcome["compilation"] = {"first_pass_s": first_pass_s}
        run.begin_round("2026-12-01T00:00:00+00:00")
        run.add(Reply(outcomes=[outcome]), "", wall_s=36.0, process=1)
        assert run.again_s == again_s


@pytest.mark.parametrize("taken_up", [0, 2])
def test_all_go_on_after_rounds_of_another_run(cases: list[Case], taken_up: int) -> None:
    made = contest(cases, [13.0, 20.0, 40.0], rounds=1)
    made._ends_s = 0.0
    made.runs[cases[2].id].num_finished = taken_up  # type: ignore[misc]
    assert made.before_second_round() == []
    assert len(made.runs) == 3


def test_the_same_command_measures_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = {"naive": 10.0, "sdpa": 10.2, "flash_torch": 12.0, "sdpa_math": 10.1}

    def one_group(cases: list[Case], options: RunOptions) -> list[CaseGroup]:
        return [Contest(cases, options, {case.id: 1 for case in cases}, 0.0, 110.0)]

    host = stand_in(monkeypatch)
    host.times = lambda turn: [speed[turn[0]]] * 2
    bench = Bench(tmp_path, attention=",".join(speed))
    options = RunOptions(results=tmp_path, interleave=5, until_decided=True)
    for rounds, kept in (
        ({"naive": 5, "sdpa_math": 5}, {"sdpa": 1, "flash_torch": 1}),
        (dict.fromkeys(speed, 5), {}),
    ):
        runner = Runner(options, bench.store, Listener(), grouping=one_group)
        runner.run([case for case in bench.cases if case.attention.name not in bench.records()])
        found = {name: len(record.rounds) for name, record in bench.records().items()}
        assert found == rounds
        assert bench.kept() == kept
    assert len(host.turns) == 4 * 5
