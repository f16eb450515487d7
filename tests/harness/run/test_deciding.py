"""``until=decided``: rounds are added where a verdict is open, and nowhere else."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_workers import Bench, Host, Listener, Turn, stand_in

from harness.analysis.verdicts import LOOKS, decide, looks_at
from harness.bench.bench import Bench as RankBench
from harness.request.compose import compose_request
from harness.run.deciding import AUTO_BUDGET_S, Budget, affordable, pairs_of
from harness.run.record_builder import RecordBuilder

DECIDED: dict[str, Any] = {"rounds": 5, "until_decided": True, "max_rounds": 14}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return stand_in(monkeypatch)


def noisy(**medians_ms: float) -> Any:
    """Two passes a round, by backend: around a median, with 8% from round to round."""

    def times(turn: Turn) -> list[float]:
        draw = random.Random(f"{turn}").gauss(0.0, 0.08)
        return [medians_ms[turn[0]] * (1 + draw)] * 2

    return times


def num_turns(host: Host) -> Counter[str]:
    return Counter(name for name, _ in host.turns)


class TestRoundsAreAdded:
    def test_not_where_the_first_decide(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=2.0, sdpa=1.0)
        records = Bench(tmp_path).run(**DECIDED)
        assert num_turns(host) == {"naive": 5, "sdpa": 5}
        for record in records.values():
            assert record.stopped == "decided after 5 rounds"
            assert record.rounds == [2] * 5
            assert len(record.round_states) == 5

    def test_until_the_most_where_nothing_does(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, sdpa=1.0)
        records = Bench(tmp_path).run(**DECIDED)
        assert num_turns(host) == {"naive": 14, "sdpa": 14}
        for record in records.values():
            assert record.stopped == "14 rounds, the most allowed: 1 pair UNCLEAR"
            assert record.notes["interleaved_rounds"] == 14
        # A further round is a further process.
        assert len(host.starts) == 14

    def test_until_the_look_that_decides(self, tmp_path: Path, host: Host) -> None:
        """That is the one at which the verdicts themselves decide."""
        host.times = noisy(naive=1.12, sdpa=1.0)
        records = Bench(tmp_path).run(rounds=5, until_decided=True, max_rounds=40)
        expected = next(
            number
            for number in LOOKS
            if decide(
                *([host.times((name, turn)) for turn in range(number)] for name in records),
                looks=looks_at(number, until_decided=True),
                baseline_processes=range(number),
                candidate_processes=range(number),
            ).word
            != "UNCLEAR"
        )
        assert expected > 5, "the example is not decided at once"
        assert num_turns(host) == dict.fromkeys(records, expected)
        assert {record.stopped for record in records.values()} == {
            f"decided after {expected} rounds"
        }

    def test_only_to_pairs_that_are_open(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, compiled=0.2, sdpa=1.0)
        bench = Bench(tmp_path, "naive,compiled,sdpa")
        host.at[("sdpa", 5)] = lambda: recorded.extend(bench.records())
        recorded: list[str] = []
        records = bench.run(**DECIDED)
        assert num_turns(host) == {"naive": 14, "compiled": 5, "sdpa": 14}
        assert recorded == ["compiled"], "it is recorded before rounds are added to others"
        assert records["compiled"].stopped == "decided after 5 rounds"
        assert records["naive"].stopped.endswith("1 pair UNCLEAR")

    @pytest.mark.parametrize("first", [1, 3])
    def test_first_rounds_that_are_too_few_for_a_look(
        self, first: int, tmp_path: Path, host: Host
    ) -> None:
        """Looking at three rounds would spend the error rate of the first look."""
        host.times = noisy(naive=9.0, sdpa=1.0)
        Bench(tmp_path).run(rounds=first, until_decided=True)
        assert num_turns(host) == {"naive": 5, "sdpa": 5}

    def test_none_without_until_decided(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, sdpa=1.0)
        records = Bench(tmp_path).run(rounds=5)
        assert num_turns(host) == {"naive": 5, "sdpa": 5}
        assert {record.stopped for record in records.values()} == {""}

    def test_none_to_a_case_that_is_compared_with_nothing(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0)
        (record,) = Bench(tmp_path, "naive").run(**DECIDED).values()
        assert (num_turns(host), record.stopped) == ({"naive": 5}, "")

    def test_one_that_fails_in_an_added_round(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, sdpa=1.0)
        host.statuses[("sdpa", 5)] = "oom"
        records = Bench(tmp_path).run(**DECIDED)
        assert (records["sdpa"].status, records["naive"].status) == ("oom", "ok")
        assert records["naive"].rounds in ([2] * 6, [2] * 7)
        assert records["naive"].stopped == ""


class TestBudget:
    def test_nothing_left(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, sdpa=1.0)
        records = Bench(tmp_path).run(**DECIDED, budget_s=0.0)
        assert num_turns(host) == {"naive": 5, "sdpa": 5}
        for record in records.values():
            assert record.stopped == "time budget of 0 s, after 5 rounds: 1 pair UNCLEAR"

    def test_it_is_shared_out_by_cases(self) -> None:
        budget = Budget(100.0, 10)
        assert budget.share(4, first_rounds_s=1.0) == pytest.approx(40.0)
        budget.spend(10.0)
        assert budget.share(6, first_rounds_s=1.0) == pytest.approx(90.0)

    def test_without_one_it_follows_the_first_rounds(self) -> None:
        least_s, most_s = AUTO_BUDGET_S
        for first_s, expected in [(1.0, least_s), (100.0, 100.0), (9999.0, most_s)]:
            assert Budget(None, 3).share(3, first_s) == expected

    def test_cheap_ones_come_first(self) -> None:
        assert affordable([5.0, 1.0, 2.0, 9.0], 8.5) == {0, 1, 2}
        assert affordable([5.0], 4.0) == set()


class TestInterruptions:
    @pytest.mark.parametrize("stop_at", [("naive", 5), ("sdpa", 5), ("naive", 6), ("sdpa", 9)])
    def test_nothing_finished_is_lost(self, stop_at: Turn, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, sdpa=1.0)
        undisturbed = Bench(tmp_path / "undisturbed").run(**DECIDED)
        host.turns.clear()
        bench = Bench(tmp_path)
        bench.stop(stop_at, **DECIDED)
        assert sum(bench.kept().values()) == len(host.turns)
        records = bench.run(**DECIDED)
        assert num_turns(host) == {"naive": 14, "sdpa": 14}
        assert max(Counter(host.turns).values()) == 1
        assert bench.files() == []
        for name, record in records.items():
            assert record.stopped == undisturbed[name].stopped
            assert record.phases == undisturbed[name].phases

    def test_then_without_until_decided(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, sdpa=1.0)
        bench = Bench(tmp_path)
        bench.stop(("sdpa", 6), **DECIDED)
        records = bench.run(rounds=5)
        assert [len(record.rounds) for record in records.values()] == [7, 6]
        assert all(record.environment for record in records.values())

    def test_a_baseline_is_recorded_last(self, tmp_path: Path, host: Host) -> None:
        """Or the others would be compared with nothing after a crash between the two."""
        host.times = noisy(naive=2.0, sdpa=1.0)
        finished: list[str] = []

        class Noting(Listener):
            def finished(self, record: Any, *, measured_now: bool) -> None:
                finished.append(record.case["attention"]["name"])

        Bench(tmp_path).run(Noting(), **DECIDED)
        assert finished == ["sdpa", "naive"]


def test_added_rounds_have_the_passes_of_the_first_and_no_notes(tmp_path: Path, host: Host) -> None:
    rounds = [RankBench(device=torch.device("cpu"), rounds=5, round_index=i) for i in range(9)]
    assert [bench.share(23) for bench in rounds] == [5, 5, 5, 4, 4, 4, 4, 4, 4]
    assert [bench.in_last_round for bench in rounds] == [False] * 4 + [True] + [False] * 4
    host.times = noisy(naive=1.0, sdpa=1.0)
    for record in Bench(tmp_path).run(**DECIDED).values():
        assert record.notes["loss"] == 4.0, "of the last round that every case has"
        assert record.device_state[0]["after"] == {"at": 13}


def test_pairs_are_those_of_the_comparison_table() -> None:
    arguments = ["model=tiny", "device=cpu", "attention=sdpa,naive,compiled", "parallel.dp=2"]
    cases = compose_request([*arguments, "parallel=ddp_bucketed,ddp_naive"]).cases
    found = {
        tuple((run.case.attention.name, run.case.parallel.name) for run in pair.runs)
        for pair in pairs_of([RecordBuilder(case, 5) for case in cases])
    }
    for strategy in ("ddp_bucketed", "ddp_naive"):
        for name in ("sdpa", "compiled"):
            assert (("naive", strategy), (name, strategy)) in found
    for name in ("naive", "sdpa", "compiled"):
        assert ((name, "ddp_bucketed"), (name, "ddp_naive")) in found
    assert len(found) == 2 * 2 + 3
