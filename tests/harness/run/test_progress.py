"""What a run says while it measures, where there is no terminal with a live line."""

from __future__ import annotations

import io
import time

import pytest
from records import make_record
from rich.console import Console

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.run.progress import TerminalProgress
from harness.store.record import Record

PREDICTED_S = 30.0
"""Of each case in all its rounds."""


class Run:
    """A run of two cases that take turns, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
        self.cases = compose_request(["task=attention", "attention=naive,sdpa"]).cases
        self._now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self._now)
        self._output = io.StringIO()
        self.progress = TerminalProgress(
            Console(file=self._output, width=100), self.cases, lambda case: PREDICTED_S, rounds
        )

    def round(self, case: Case, seconds: float) -> None:
        self.progress.started(case)
        self._now += seconds

    def finish(self, case: Case, *, measured_now: bool = True) -> None:
        self.progress.finished(self._record(case), measured_now=measured_now)

    def _record(self, case: Case) -> Record:
        record = make_record()
        record.case_id = case.id
        return record

    def said(self) -> list[str]:
        """The lines since it was asked last."""
        lines = self._output.getvalue().splitlines()
        self._output.seek(0)
        self._output.truncate()
        return [line.strip() for line in lines]


def test_each_round_has_a_line_and_time_left_follows_the_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing finishes for two thirds of the time, and then everything at once."""
    run = Run(monkeypatch, rounds=3)
    one, other = run.cases
    for case in (one, other):
        run.round(case, 20.0)
    assert run.said() == []
    for number, words in ((2, "round 2 of 3, about 0:57 left"), (3, "round 3 of 3, about 0:40 le")):
        for case in (other, one):
            run.round(case, 20.0)
        assert run.said()[0].startswith(words), number
    run.finish(one)
    (finished,) = run.said()
    assert finished.startswith("[1/2]")


def test_first_turns_say_little_of_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s predicted for a turn, the first takes 90, since it compiles, and others 5."""
    run = Run(monkeypatch, rounds=3)
    one, other = run.cases
    run.round(one, 90.0)
    run.round(one, 5.0)
    # Of the other case 10 s at the pace of first turns, 9; of both 20 s more at one between, 3.
    assert run.said() == ["round 2 of 3, about 3:30 left"]
    run.round(other, 90.0)
    run.round(other, 5.0)
    assert run.said() == ["round 2 of 3, about 0:15 left"]


def test_a_case_that_is_left_out_takes_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, rounds=3)
    one, other = run.cases
    run.round(one, 20.0)
    run.round(other, 20.0)
    run.progress.left_out(other)
    run.round(one, 5.0)
    # 20 s predicted, at a pace between the predicted one and that of first turns, which is 2.
    assert run.said() == ["round 2 of 3, about 0:28 left"]
    run.round(one, 5.0)
    assert run.said() == ["round 3 of 3, about 0:05 left"]
    run.finish(one)
    (finished,) = run.said()
    assert finished.startswith("[1/1]")
    assert "left" not in finished


def test_rounds_that_are_added_until_a_pair_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, rounds=1)
    for _ in range(2):
        for case in run.cases:
            run.round(case, 1.0)
    assert run.said() == ["round 2, until pairs are decided"]
    run.finish(run.cases[0])
    (finished,) = run.said()
    assert finished.startswith("[1/2]")


def test_cases_one_after_another_have_no_lines_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, rounds=1)
    one, other = run.cases
    run.round(one, 60.0)
    run.finish(one)
    (finished,) = run.said()
    assert finished.startswith("[1/2]")
    assert finished.endswith("ok  (about 1:00 left)")
    run.round(other, 60.0)
    run.finish(other)
    (finished,) = run.said()
    assert finished.startswith("[2/2]")


def test_what_another_run_measured_says_nothing_of_the_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, rounds=1)
    one, _ = run.cases
    run.finish(one, measured_now=False)
    (finished,) = run.said()
    assert finished.endswith("(about 0:30 left)")
