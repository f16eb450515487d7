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
from harness.run.children.reply import Reply
from harness.run.rounds.case_group import CaseGroup
from harness.run.rounds.deciding import AUTO_BUDGET_S, Budget, affordable, pairs_of, stop_reason
from harness.run.rounds.options import RunOptions
from harness.run.rounds.record_builder import RecordBuilder

DECIDED: dict[str, Any] = {
    "rounds": 5,
    "until_decided": True,
    "max_rounds": 14,
    # More than the slowest machine takes: no test depends on a clock.
    "budget_s": 9999.0,
}


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
        records = Bench(tmp_path).run(rounds=5, until_decided=True, max_rounds=40, budget_s=9999.0)
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
        Bench(tmp_path).run(rounds=first, until_decided=True, budget_s=9999.0)
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


class TestWhatRoundsDoNotTell:
    """Pairs that are UNCLEAR whatever is added get nothing, and their records say so."""

    def test_times_of_the_host(self, tmp_path: Path, host: Host) -> None:
        """``naive`` waits for its host, and no verdict on it is about kernels."""
        host.times = noisy(naive=1.0, sdpa=1.0)
        host.further = {
            "naive": lambda turn: {
                "host_ms": {"step": [0.9] * 2},
                "device_ms": {"step": [0.5] * 2},
            }
        }
        records = Bench(tmp_path, device="cuda").run(**DECIDED)
        assert num_turns(host) == {"naive": 5, "sdpa": 5}
        for record in records.values():
            assert record.stopped == (
                "5 rounds: 1 pair UNCLEAR, which more rounds would not change (host-bound)"
            )

    def test_others_of_the_group_get_theirs(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, compiled=1.0, sdpa=1.0)
        host.further = {
            "sdpa": lambda turn: {"host_ms": {"step": [0.9] * 2}, "device_ms": {"step": [0.5] * 2}}
        }
        records = Bench(tmp_path, "naive,compiled,sdpa", device="cuda").run(**DECIDED)
        assert num_turns(host) == {"naive": 14, "compiled": 14, "sdpa": 5}
        assert records["naive"].stopped == (
            "14 rounds, the most allowed: 1 pair UNCLEAR; "
            "14 rounds: 1 pair UNCLEAR, which more rounds would not change (host-bound)"
        )

    def test_a_busy_device_is_no_such_reason(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, sdpa=1.0)
        host.further = {
            name: lambda turn: {
                "host_ms": {"step": [0.1] * 2},
                "device_ms": {"step": [0.98 * time for time in host.times(turn)]},
            }
            for name in ("naive", "sdpa")
        }
        Bench(tmp_path, device="cuda").run(**DECIDED)
        assert num_turns(host) == {"naive": 14, "sdpa": 14}

    def test_strategies_are_compared_by_the_times_of_their_hosts(self) -> None:
        arguments = ["model=tiny", "device=cpu", "parallel=ddp_bucketed,ddp_naive"]
        cases = compose_request([*arguments, "parallel.dp=2"]).cases
        (pair,) = pairs_of([RecordBuilder(case, 5) for case in cases])
        assert pair.choice == "strategy"

    @pytest.mark.parametrize(
        ("times_ms", "reason"),
        [
            ({"step": [0.0, 1.0]}, "a time is not above zero"),
            (
                {"step": [1.0, 1.0], "forward": [0.6, 0.6], "backward": [0.6, 0.6]},
                "the parts of a pass take longer than the whole",
            ),
            ({"step": [1e-6, 1e-6]}, "a rate is above the device's peak"),
        ],
    )
    def test_times_that_cannot_be(
        self, times_ms: dict[str, list[float]], reason: str, tmp_path: Path, host: Host
    ) -> None:
        host.further = {
            "sdpa": lambda turn: {
                "samples_ms": times_ms,
                "clocks": dict.fromkeys(times_ms, "host"),
            }
        }
        records = Bench(tmp_path).run(**DECIDED)
        assert num_turns(host) == {"naive": 5, "sdpa": 5}
        assert records["sdpa"].stopped == (
            f"5 rounds: 1 pair UNCLEAR, which more rounds would not change ({reason})"
        )


def test_phases_that_a_case_does_not_have_are_no_reason(tmp_path: Path, host: Host) -> None:
    """Attention alone has no step that its parts could exceed."""

    def of_attention(median_ms: float) -> Any:
        def outcome(turn: Turn) -> dict[str, Any]:
            times = noisy(**{turn[0]: median_ms})(turn)
            halves = [time / 2 for time in times]
            samples = {"forward": halves, "backward": halves, "forward_backward": times}
            return {"samples_ms": samples, "clocks": dict.fromkeys(samples, "host")}

        return outcome

    host.further = {"naive": of_attention(2.0), "sdpa": of_attention(1.0)}
    bench = Bench(tmp_path)
    arguments = ["task=attention", "attention=naive,sdpa", "device=cpu", f"results={tmp_path}"]
    bench.cases = compose_request(arguments).cases
    stopped = [record.stopped for record in bench.run(**DECIDED).values()]
    assert stopped == ["decided after 5 rounds"] * 2


def test_reasons_are_sentences() -> None:
    assert stop_reason(7) == "decided after 7 rounds"
    assert stop_reason(28, most=2) == "28 rounds, the most allowed: 2 pairs UNCLEAR"
    late = "time budget of 120 s, after 5 rounds: 1 pair UNCLEAR"
    assert stop_reason(5, late=1, seconds=120) == late
    assert stop_reason(5, late=1, most=1, seconds=120) == (
        f"{late}; 5 rounds, the most allowed: 1 pair UNCLEAR"
    )


class TestBudget:
    def test_nothing_left(self, tmp_path: Path, host: Host) -> None:
        host.times = noisy(naive=1.0, sdpa=1.0)
        records = Bench(tmp_path).run(**DECIDED | {"budget_s": 0.0})
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

    def test_what_is_told_soonest_comes_first(self) -> None:
        assert affordable([5.0, 1.0, 2.0, 9.0], 8.5) == {0, 1, 2}
        assert affordable([5.0], 4.0) == set()
        assert affordable([5.0, 5.0], 6.0, [100.0, 10.0]) == {1}
        assert affordable([5.0, 3.0, 1.0], 4.5, [1.0, 2.0, 3.0]) == {1, 2}

    def test_a_pair_at_the_edge_of_the_band_is_far_from_a_decision(self) -> None:
        """Its rounds are as many and as noisy as those of a pair that is nearly told."""
        random.seed(1)
        noise = [random.gauss(0.0, 0.02) for _ in range(10)]

        def seconds(ratio: float) -> float:
            arguments = ["model=tiny", "attention=naive,sdpa", "device=cpu"]
            group = CaseGroup(
                compose_request(arguments).cases,
                RunOptions(results=Path(), interleave=5, until_decided=True),
            )
            for place, case in enumerate(group.cases):
                run = group.runs[case.id] = RecordBuilder(case, 5)
                for number in range(5):
                    time_ms = (ratio if place else 1.0) * (1 + noise[5 * place + number])
                    outcome = {"rank": 0, "status": "ok", "samples_ms": {"step": [time_ms] * 2}}
                    run.begin_round("2026-01-02T03:04:05+00:00")
                    outcome["clocks"] = {"step": "host"}
                    run.add(Reply(outcomes=[outcome]), "", 1.0, number)
            group.look()
            assert group.is_open
            return group.seconds_to_tell()

        assert seconds(1.04) < 60 < seconds(1.015)


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


@pytest.mark.parametrize(
    ("strategies", "expected"),
    [
        (
            "fsdp,ddp_torch,fsdp_torch",
            {("ddp_torch", "fsdp"), ("ddp_torch", "fsdp_torch"), ("fsdp_torch", "fsdp")},
        ),
        ("fsdp,fsdp_torch", {("fsdp_torch", "fsdp")}),
    ],
)
def test_strategies_are_held_against_their_peers(
    strategies: str, expected: set[tuple[str, str]]
) -> None:
    arguments = ["model=tiny", "device=cpu", "parallel.dp=2", f"parallel={strategies}"]
    pairs = pairs_of([RecordBuilder(case, 5) for case in compose_request(arguments).cases])
    names = [
        (pair.baseline.case.parallel.name, pair.candidate.case.parallel.name) for pair in pairs
    ]
    assert sorted(names) == sorted(expected)
