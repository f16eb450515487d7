"""The order of turns, the processes of rounds, and batches of cases, with workers stood in for."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_workers import Bench, Host, Listener, stand_in

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.run import runner
from harness.run.rounds.interleaving import turns
from harness.run.rounds.options import RunOptions
from harness.run.runner import Runner
from harness.run.warm_workers import Workers

ROUNDS = 4


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return stand_in(monkeypatch)


def cases_of(*arguments: str) -> list[Case]:
    return compose_request(["model=tiny", "device=cpu", *arguments]).cases


def pairs() -> list[list[Case]]:
    """Two cases that are compared, and two others."""
    return [cases_of("attention=naive,sdpa", f"seq_len={length}") for length in (64, 128)]


def measure(path: Path, cases: list[Case], **options: object) -> None:
    bench = Bench(path)
    values = {"interleave": ROUNDS} | options
    made = RunOptions(results=path, **values)  # type: ignore[arg-type]
    Runner(made, bench.store, Listener()).run(cases)


def processes(host: Host) -> dict[str, list[int]]:
    """By case, the number of the workers that measured each round."""
    found: dict[str, list[int]] = {}
    for case_id, _, number in host.asked:
        found.setdefault(case_id, []).append(number)
    return found


class TestOrder:
    def test_every_case_once_and_the_same_again(self) -> None:
        cases = cases_of("attention=naive,sdpa,compiled,flex")
        for index in range(20):
            order = turns(cases, index)
            assert Counter(case.id for case in order) == Counter(case.id for case in cases)
            assert order == turns(cases, index)

    def test_neither_of_two_is_always_first(self) -> None:
        cases = cases_of("attention=naive,sdpa")
        firsts = Counter(turns(cases, index)[0].id for index in range(200))
        assert min(firsts.values()) > 70
        pairs = Counter(
            turns(cases, index)[0] is turns(cases, index + 1)[0] for index in range(200)
        )
        assert min(pairs.values()) > 70, "no fixed alternation either"

    def test_the_runner_keeps_it_over_an_interruption(self, tmp_path: Path, host: Host) -> None:
        host.random_order = True
        cases = cases_of("attention=naive,sdpa")
        expected = [(case.id, index) for index in range(ROUNDS) for case in turns(cases, index)]
        store = Bench(tmp_path).store
        options = RunOptions(results=tmp_path, interleave=ROUNDS)
        with contextlib.suppress(KeyboardInterrupt):
            Runner(options, store, Listener(("naive", 2))).run(cases)
        assert 4 <= len(host.asked) <= 6
        Runner(options, store, Listener()).run(cases)
        assert [turn[:2] for turn in host.asked] == expected

    def test_records_tell_the_order(self, tmp_path: Path, host: Host) -> None:
        host.random_order = True
        host.at = {
            turn: lambda: time.sleep(0.002)
            for turn in itertools.product(("naive", "sdpa"), range(4))
        }
        bench = Bench(tmp_path)
        records = bench.run(rounds=4)
        began = [
            (state.started_at, index, name)
            for name, record in records.items()
            for index, state in enumerate(record.round_states)
        ]
        told = [(name, index) for _, index, name in sorted(began)]
        assert told == host.turns
        starts = [record.notes["rounds_started_at"] for record in records.values()]
        assert starts[0] == starts[1], "cases that take turns begin a round together"


class TestProcesses:
    def test_each_round_has_its_own_and_many_cases_share_them(
        self, tmp_path: Path, host: Host
    ) -> None:
        host.random_order = True
        cases = cases_of("attention=naive,sdpa", "seq_len=64,128,256")
        measure(tmp_path, cases)
        assert len(host.starts) == ROUNDS
        assert set(map(tuple, processes(host).values())) == {(1, 2, 3, 4)}
        records, _ = Bench(tmp_path).store.load()
        assert len(records) == 6
        for record in records.values():
            numbers = [state.process for state in record.round_states]
            assert numbers == sorted(set(numbers))
            assert len(numbers) == ROUNDS

    @pytest.mark.parametrize("options", [{"fresh_rounds": False}, {"interleave": 1}])
    def test_one_for_all(self, options: dict[str, object], tmp_path: Path, host: Host) -> None:
        measure(tmp_path, cases_of("attention=naive,sdpa", "seq_len=64,128"), **options)
        assert len(host.starts) == 1

    @pytest.mark.parametrize(
        ("device", "fresh", "expected"),
        [
            ("cpu", None, (1, 2, 3, 4)),
            ("cuda", None, (1, 1, 2, 2)),
            ("cuda", True, (1, 2, 3, 4)),
            ("cuda", False, (1, 1, 1, 1)),
        ],
    )
    def test_several_gpus_share_them_between_two_rounds(
        self, device: str, fresh: bool | None, expected: tuple[int, ...], tmp_path: Path, host: Host
    ) -> None:
        cases = cases_of("attention=naive,sdpa", "parallel=ddp_bucketed", "parallel.dp=2")
        cases = [replace(case, device=device) for case in cases]
        measure(tmp_path, cases, fresh_rounds=fresh)
        assert set(map(tuple, processes(host).values())) == {expected}

    def test_world_sizes_are_not_mixed(self, tmp_path: Path, host: Host) -> None:
        split = cases_of("attention=naive,sdpa", "parallel=ddp_bucketed", "parallel.dp=2")
        measure(tmp_path, split + cases_of("attention=naive,sdpa"))
        assert len(host.starts) == 2 * ROUNDS
        found = processes(host)
        assert {tuple(found[case.id]) for case in split} == {(5, 6, 7, 8)}

    def test_after_an_interruption(self, tmp_path: Path, host: Host) -> None:
        """The workers that begin anew have measured nothing of the case."""
        bench = Bench(tmp_path)
        bench.stop(("sdpa", 1))
        bench.run()
        records = bench.records()
        for record in records.values():
            assert len({state.process for state in record.round_states}) == 3
        assert len(host.starts) == 2 + 2

    def test_compiled_code_outlives_them_and_not_the_run(self, tmp_path: Path, host: Host) -> None:
        measure(tmp_path, cases_of("attention=naive,sdpa"))
        assert len(host.starts) == ROUNDS
        (folder,) = set(host.starts)
        assert not Path(folder).exists()


class TestGivenWorkers:
    """Those of several runs."""

    @pytest.fixture
    def workers(self, tmp_path: Path) -> Iterator[Workers]:
        with contextlib.closing(
            Workers(RunOptions(results=tmp_path), None, lambda: None)
        ) as workers:
            yield workers

    def measure(
        self, path: Path, workers: Workers | None, arguments: str, **options: Any
    ) -> Listener:
        listener = Listener()
        made = RunOptions(results=path, **options)
        Runner(made, Bench(path).store, listener, workers=workers).run(cases_of(*arguments.split()))
        return listener

    def test_are_left_open_and_a_runners_own_are_not(
        self, tmp_path: Path, host: Host, workers: Workers
    ) -> None:
        first = self.measure(tmp_path, workers, "seq_len=64")
        second = self.measure(tmp_path, workers, "seq_len=128")
        assert [number for _, _, number in host.asked] == [1, 1]
        assert host.ended == []
        # Each run is told what happens in it.
        assert first.stages == ["starting workers", "measuring"]
        assert second.stages == ["measuring"]
        self.measure(tmp_path, None, "seq_len=256")
        assert host.ended == [2]
        workers.close()
        assert host.ended == [2, 1]

    def test_end_with_a_case_that_is_broken_off(
        self, tmp_path: Path, host: Host, workers: Workers
    ) -> None:
        """They are in the middle of it; the next run has others."""
        stop = Listener(("sdpa", 0), in_the_middle=True)
        cases = cases_of("attention=naive,sdpa")
        options = RunOptions(results=tmp_path)
        with pytest.raises(KeyboardInterrupt):
            Runner(options, Bench(tmp_path).store, stop, workers=workers).run(cases)
        assert host.ended == [1]
        self.measure(tmp_path, workers, "attention=sdpa")
        assert [number for _, _, number in host.asked] == [1, 2]

    @pytest.mark.parametrize(
        ("arguments", "options", "starts"),
        [
            ("seq_len=128", {"budget_s": 9.0, "interleave": 2, "fresh_rounds": False}, 1),
            ("parallel=ddp_bucketed parallel.dp=2", {}, 2),
            ("seq_len=128", {"timeout_s": 9.0}, 2),
            ("seq_len=128", {"vote_timeout_s": 9.0}, 2),
        ],
    )
    def test_are_new_for_a_run_that_starts_them_otherwise(
        self,
        arguments: str,
        options: dict[str, Any],
        starts: int,
        tmp_path: Path,
        host: Host,
        workers: Workers,
    ) -> None:
        self.measure(tmp_path, workers, "seq_len=64")
        self.measure(tmp_path, workers, arguments, **options)
        assert len(host.starts) == starts
        assert host.ended == [1][: starts - 1], "there is one group at a time"


class TestBatches:
    def test_a_round_goes_over_all_cases_before_the_next(self, tmp_path: Path, host: Host) -> None:
        host.random_order = True
        measure(tmp_path, cases_of("attention=naive,sdpa", "seq_len=64,128,256"))
        assert [index for _, index, _ in host.asked] == sorted([*range(ROUNDS)] * 6)

    def test_groups_change_places(self, tmp_path: Path, host: Host) -> None:
        cases = cases_of("seq_len=64,128,256,512")
        measure(tmp_path, cases)
        order = [[case for case, index, _ in host.asked if index == turn] for turn in range(ROUNDS)]
        assert order[0] == [case.id for case in cases]
        assert len(set(map(tuple, order))) > 1

    def test_a_long_round_ends_a_batch(
        self, tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its cases are recorded before others begin, and those share its last workers."""
        monkeypatch.setattr(runner, "BATCH_S", 0.0)
        short, long = (
            cases_of("attention=naive,sdpa", f"seq_len={length}") for length in (64, 128)
        )
        measure(tmp_path, short + long)
        assert [case_id for case_id, _, _ in host.asked[:8]] == [case.id for case in short] * ROUNDS
        found = processes(host)
        assert {tuple(found[case.id]) for case in short} == {(1, 2, 3, 4)}
        assert {tuple(found[case.id]) for case in long} == {(4, 5, 6, 7)}

    def test_what_another_process_holds_comes_last(self, tmp_path: Path, host: Host) -> None:
        held, other = (
            cases_of("attention=naive,sdpa", f"seq_len={length}") for length in (64, 128)
        )
        theirs = Bench(tmp_path).store
        with contextlib.ExitStack() as claim:
            claim.enter_context(claimed_elsewhere(tmp_path, held[1].id))
            for turn in itertools.product(("naive", "sdpa"), [ROUNDS - 1]):
                host.at[turn] = claim.close
            measure(tmp_path, held + other)
        first = [case_id for case_id, _, _ in host.asked[: 2 * ROUNDS]]
        assert set(first) == {case.id for case in other}
        assert len(theirs.load()[0]) == 4


@contextlib.contextmanager
def claimed_elsewhere(path: Path, case_id: str) -> Iterator[None]:
    """Another process holds a case until the block ends."""
    code = (
        "import sys; from pathlib import Path; from harness.store.record import RecordStore\n"
        f"with RecordStore(Path({str(path)!r})).claim({case_id!r}, wait=True):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.stdin.close()
            process.wait()
