"""Rounds of interleaved cases: kept when a run is stopped, taken up by the next, never mixed.

Workers are stood in for by a group that says which turn it was given; the last test stops the
real command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fake_workers import Bench, Host, Listener, stand_in
from fault_folders import GUARD_S, STEP, Folder, no_process_left, wait_until

import harness.store.atomic
import harness.store.rounds
from harness.request import session
from harness.request.compose import compose_request
from harness.request.grid import expand
from harness.request.plan import SETUP_S, plan_cases, predicted_seconds
from harness.run.rounds.options import RunOptions
from harness.run.run_folder import RunFolder, TaskState
from harness.run.runner import Runner
from harness.run.slurm.task import Leader, ShareTask, _Watchful
from harness.store.attempts import Records
from harness.store.record import Record
from harness.store.rounds import RoundStore


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises, also where a shell has started the tests with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


ALL = [("naive", 0), ("sdpa", 0), ("naive", 1), ("sdpa", 1), ("naive", 2), ("sdpa", 2)]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return stand_in(monkeypatch)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def in_shape(record: Record) -> dict[str, Any]:
    """All but times, and what tells of the stop."""
    values = json.loads(record.to_json())
    for key in ("started_at", "wall_s"):
        assert values.pop(key)
    assert len(values["notes"].pop("rounds_started_at")) == 3
    values["notes"].pop("resumed_rounds", None)
    for state in values["round_states"]:
        assert state.pop("started_at")
        assert state.pop("process")
    assert len(values["round_states"]) == 3
    return values


class TestGoingOn:
    @pytest.mark.parametrize("in_the_middle", [False, True])
    @pytest.mark.parametrize("number", range(1, len(ALL)))
    def test_no_finished_round_is_measured_again(
        self, number: int, in_the_middle: bool, bench: Bench, host: Host, tmp_path: Path
    ) -> None:
        """Wherever it is stopped; they take turns again, and records are as if it had not been."""
        undisturbed = Bench(tmp_path / "undisturbed").run()
        assert host.turns == ALL
        host.turns.clear()
        with pytest.raises(KeyboardInterrupt):
            bench.run(Listener(ALL[number], in_the_middle=in_the_middle))
        assert host.turns == ALL[:number]
        # The last turn of the first backend is its record.
        whole = {"naive"} if number == len(ALL) - 1 else set()
        before = {name: sum(name == turn[0] for turn in ALL[:number]) for name in ("naive", "sdpa")}
        assert set(bench.records()) == whole
        assert bench.kept() == {
            name: rounds for name, rounds in before.items() if rounds and name not in whole
        }
        records = bench.run()
        assert host.turns == ALL
        assert bench.files() == []
        for name, record in records.items():
            assert record.attempt == 1
            assert record.rounds == [2, 2, 2]
            assert record.phases["step"].samples_ms == [[0.25, 0.5, 1.25, 1.5, 2.25, 2.5]]
            assert in_shape(record) == in_shape(undisturbed[name])
            resumed = 0 if name in whole else before[name]
            assert record.notes.get("resumed_rounds", 0) == resumed

    def test_stopped_twice_and_time_adds_up(self, bench: Bench, host: Host) -> None:
        bench.stop(("naive", 1))
        for path in bench.files():
            values = json.loads(path.read_text())
            path.write_text(
                json.dumps(values | {"wall_s": 50.0, "started_at": ["2026-01-02T03:04:05+00:00"]})
            )
        # The second round that starts in the second run is the third.
        bench.stop(("naive", 1))
        assert bench.kept() == {"naive": 2, "sdpa": 2}
        records = bench.run()
        assert host.turns == ALL
        for record in records.values():
            assert record.notes["resumed_rounds"] == 2
            assert record.started_at == "2026-01-02T03:04:05+00:00"
            assert record.notes["rounds_started_at"][0] == record.started_at
            assert record.notes["rounds_started_at"][1] > record.started_at
            assert 50 < record.wall_s < 60
        starts = [record.notes["rounds_started_at"] for record in records.values()]
        assert starts[0] == starts[1], "cases that take turns begin a round together"

    def test_a_signal_waits_until_the_round_is_kept(self, bench: Bench, host: Host) -> None:
        """A handler that raises while the file is written would leave the round out."""
        keep = RoundStore.keep

        def interrupted(self: RoundStore, rounds: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            keep(self, rounds)

        with pytest.MonkeyPatch.context() as patch, interruptible():
            patch.setattr(RoundStore, "keep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                bench.run()
        assert bench.kept() == {"naive": 1}

    def test_progress_says_which_round(self, bench: Bench, host: Host) -> None:
        listener = Listener()
        bench.run(listener)
        turns = [stage for stage in listener.stages if stage.endswith("measuring")]
        assert turns[1:4] == [
            *("round 1 of 3, measuring", "round 2 of 3, measuring", "round 2 of 3, measuring")
        ]

    def test_one_round_keeps_nothing(self, bench: Bench, host: Host) -> None:
        bench.stop(("sdpa", 0), rounds=1)
        assert list(bench.records()) == ["naive"]
        assert not (bench.path / "rounds").exists()
        (record,) = bench.records().values()
        assert "rounds_started_at" not in record.notes


def change(key: str, value: Any) -> Callable[[Host, pytest.MonkeyPatch], None]:
    return lambda host, patch: host.environment.update({key: value})


def edit_code(host: Host, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(harness.store.rounds, "_code", lambda: "edited")


class TestOtherConditions:
    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            (change("torch", "2.12.0"), "torch was 2.11.0 and is 2.12.0"),
            (change("device_name", "NVIDIA B200"), "device_name was NVIDIA H200 and is NVIDIA B2"),
            (change("cudnn", 92000), "cudnn was None and is 92000"),
            (edit_code, "is edited"),
        ],
    )
    def test_all_is_measured_again(
        self,
        changed: Callable[[Host, pytest.MonkeyPatch], None],
        said: str,
        bench: Bench,
        host: Host,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        bench.stop(("naive", 2))
        host.turns.clear()
        changed(host, monkeypatch)
        records = bench.run()
        assert host.turns == ALL
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("attnbench: finished rounds of 2 cases are measured again: ")
        assert said in line
        for record in records.values():
            assert "resumed_rounds" not in record.notes
            assert record.rounds == [2, 2, 2]
        assert bench.files() == []

    @pytest.mark.parametrize("key", ["git_revision", "host_memory_bytes"])
    def test_what_does_not_matter(
        self, key: str, bench: Bench, host: Host, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bench.stop(("naive", 2))
        host.environment[key] = "999" if key == "git_revision" else 999
        assert bench.run()["sdpa"].notes["resumed_rounds"] == 2
        assert capsys.readouterr().err == ""

    def test_other_number_of_rounds_by_mistake(
        self, bench: Bench, host: Host, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Until a round of the new number has ended, nothing of the old ones is lost."""
        bench.stop(("naive", 2))
        bench.stop(("naive", 0), rounds=9)
        assert "interleave was 3 and is 9" in capsys.readouterr().err
        assert bench.kept() == {"naive": 2, "sdpa": 2}
        host.turns.clear()
        bench.run()
        assert host.turns == ALL[4:]

    def test_fewer_rounds_replace_them(self, bench: Bench, host: Host) -> None:
        bench.stop(("naive", 2))
        host.turns.clear()
        records = bench.run(rounds=2)
        assert host.turns == ALL[:4]
        assert [record.rounds for record in records.values()] == [[2, 2]] * 2
        assert bench.files() == []

    def test_a_file_that_cannot_be_read(
        self, bench: Bench, host: Host, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bench.stop(("naive", 2))
        broken, other = bench.files()
        broken.write_text(broken.read_text()[:100])
        other.write_text(other.read_text().replace('"schema": 1}', '"schema": 99}'))
        host.turns.clear()
        bench.run()
        assert host.turns == ALL
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 2
        assert all("cannot be read" in line for line in errors)

    def test_the_hash_is_of_the_code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "kernels").mkdir()
        file = tmp_path / "kernels" / "a.py"
        found = []
        for text in ("x = 1", "x = 2", "x = 1"):
            file.write_text(text)
            monkeypatch.setattr(harness.store.rounds, "ROOT", tmp_path)
            found.append(harness.store.rounds._code.__wrapped__())
        assert found[0] == found[2] != found[1]


class TestEndings:
    def test_a_case_that_ends_early_keeps_nothing(self, bench: Bench, host: Host) -> None:
        host.statuses[("naive", 1)] = "oom"
        bench.stop(("sdpa", 2))
        assert bench.records()["naive"].status == "oom"
        assert bench.kept() == {"sdpa": 2}
        host.turns.clear()
        assert bench.run()["sdpa"].status == "ok"
        assert host.turns == [("sdpa", 2)]

    def test_retry_begins_anew_and_goes_on(self, bench: Bench, host: Host) -> None:
        host.statuses[("naive", 2)] = "failed"
        bench.run()
        host.statuses.clear()
        host.turns.clear()
        bench.stop(("naive", 1), retry=True)
        assert [path.name for path in bench.files()] == [f"{bench.cases[0].id}.2.json"]
        record = bench.run(retry=True)["naive"]
        assert host.turns == [("naive", 0), ("naive", 1), ("naive", 2)]
        assert (record.attempt, record.status, record.rounds) == (2, "ok", [2, 2, 2])
        assert record.notes["resumed_rounds"] == 1

    def test_a_crash_before_rounds_are_removed(self, bench: Bench, host: Host) -> None:
        """The record is there and its rounds still are: they join nothing."""
        host.statuses[("naive", 2)] = "failed"
        bench.stop(("naive", 2))
        left = {path: path.read_text() for path in bench.files()}
        bench.run()
        for path, text in left.items():
            path.write_text(text)
            path.with_name(f"{path.name}.x1.tmp").write_text(text[:50])
        host.statuses.clear()
        host.turns.clear()
        assert "resumed_rounds" not in bench.run(retry=True)["naive"].notes
        assert host.turns == [("naive", 0), ("naive", 1), ("naive", 2)]
        assert bench.files() == []

    def test_a_command_with_nothing_to_measure_removes_them_too(
        self, bench: Bench, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.stop(("naive", 2))
        left = {path: path.read_text() for path in bench.files()}
        bench.run()
        for path, text in left.items():
            path.write_text(text)
        monkeypatch.setattr(session, "_report", lambda *arguments: 0)
        assert session.run_request(bench.request) == 0
        assert bench.files() == []

    def test_given_up_by_a_job_that_ends(self, bench: Bench, host: Host) -> None:
        """Observations of earlier rounds stay in the record."""
        bench.stop(("naive", 1))
        (case, _) = bench.cases

        def give_up() -> None:
            made.give_up_current("timeout", "not done")
            raise SystemExit

        options = RunOptions(results=bench.path, interleave=3)
        made = Runner(options, bench.store, Listener())
        host.at[("naive", 1)] = give_up
        with pytest.raises(SystemExit):
            made.run(bench.cases)
        record = bench.records()["naive"]
        assert (record.status, record.case_id) == ("timeout", case.id)
        assert record.rounds == [2]
        assert record.notes["resumed_rounds"] == 1
        assert bench.kept() == {"sdpa": 1}

    @pytest.mark.parametrize("stage", ["starting workers", "measuring"])
    def test_given_up_before_a_round_has_ended(self, stage: str, bench: Bench, host: Host) -> None:
        class Ending(Listener):
            def stage(self, name: str) -> None:
                if name == stage:
                    made.give_up_current("timeout", "not done")
                    raise SystemExit

        made = Runner(RunOptions(results=bench.path), bench.store, Ending())
        with pytest.raises(SystemExit):
            made.run(bench.cases)
        record = bench.records()["naive"]
        assert (record.status, record.rounds) == ("timeout", [])
        assert record.started_at

    def test_no_room_for_rounds(
        self,
        bench: Bench,
        host: Host,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Measuring goes on, and says what a stop would lose."""

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(harness.store.atomic.os, "fsync", full)
            bench.store.write = lambda record: bench.path  # type: ignore[method-assign]
            bench.run(rounds=2)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert "No space left on device" in lines[0]
        assert bench.files() == []


@pytest.mark.parametrize(("num_turns", "gives_up"), [(1, True), (2, False)])
def test_a_job_gives_up_what_took_it_whole(
    num_turns: int, gives_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a second round: the next job goes on from the first."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time()))
    before = signal.getsignal(signal.SIGTERM)
    folder = RunFolder(tmp_path, "run")
    folder.path.mkdir(parents=True)
    given_up = []

    class Measuring:
        def give_up_current(self, status: str, message: str) -> None:
            given_up.append(status)

    leader = Leader(ShareTask(str(tmp_path), "run", 0, 1, 1, 30), folder)
    leader._runner = Measuring()  # type: ignore[assignment]
    leader._progress = _Watchful(folder, 0, TaskState())
    (case,) = compose_request(["model=tiny", "device=cpu"]).cases
    for _ in range(num_turns):
        leader._progress.started(case)
    try:
        leader.told_to_stop()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert given_up == ["timeout"] * gives_up


def test_each_round_is_announced_and_predicted() -> None:
    request = compose_request(["model=tiny", "device=cpu", "interleave=9", "task.warmup_steps=2"])
    opening = session._opening(request, plan_cases(request, Records()), 5.0)
    assert opening.endswith(": 1 case, each in 9 rounds; predicted time 5 s")
    (case,) = request.cases
    once, split = predicted_seconds(case), predicted_seconds(case, rounds=9)
    assert split - once > 8 * SETUP_S
    per_pass = (once - SETUP_S) / case.task.num_passes()
    assert split - once == pytest.approx(8 * (SETUP_S + 2 * per_pass))


def test_models_ranks_and_compilers_take_time_to_begin() -> None:
    """On GPUs, where they take longer than short steps themselves."""

    def seconds(model: str, *, rounds: int = 3, **axes: Any) -> float:
        short = {"task": "train_step", "attention": "sdpa", "seq_len": 128, "batch_size": 1}
        (case,) = expand([{**short, "model": model, **axes}], {}, "cuda").values()
        return predicted_seconds(case, "NVIDIA H200", rounds=rounds)

    small, large = seconds("small"), seconds("2.7B")
    assert large > small + 3 * 0.3 * 3
    ranks = {"parallel": "ddp_torch", "parallel.dp": 2}
    assert seconds("small", **ranks) > small + 3
    whole, blocks = (seconds("2.7B", compile=scope) for scope in ("model", "block"))
    assert whole > blocks + 32 > large + 32
    again = seconds("2.7B", compile="model", rounds=4) - whole
    assert again > seconds("2.7B", rounds=4) - large + 1


def test_the_command_goes_on_where_it_was_stopped(tmp_path: Path, command: Command) -> None:
    """Two cases in 15 rounds each, by SIGTERM in the middle of one."""
    arguments = ("attention=held,witness", "interleave=15", "fresh_rounds=false")
    arguments += ("task.measure_steps=15", "task.warmup_steps=0")
    folder = Folder(path=tmp_path, command=command, grids=[STEP])
    process = folder.start(*arguments)
    with no_process_left(process):
        wait_until(lambda: len(list(folder.results.glob("rounds/*.json"))) == 2, "rounds are kept")
        (tmp_path / "hold").touch()
        wait_until(lambda: list(tmp_path.glob("held-*")), "a round is held")
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130
    assert stderr.strip() == "attnbench: stopped; the same command goes on where this one ended"
    paths = sorted(folder.results.glob("rounds/*"))
    kept = [len(json.loads(path.read_text())["outcomes"]) for path in paths]
    assert len(kept) == 2
    assert all(0 < number < 15 for number in kept)
    assert folder.files() == {}
    (tmp_path / "hold").unlink()
    (tmp_path / "calls").unlink()
    done = folder.run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    # One pass a round; the check was in the first.
    assert len(folder.calls()) == sum(15 - number for number in kept)
    records = folder.records().values()
    assert sorted(record["notes"]["resumed_rounds"] for record in records) == sorted(kept)
    for record in records:
        assert record["status"] == "ok"
        assert record["check"] is not None
        assert record["rounds"] == [1] * 15
        for phase in record["phases"].values():
            assert [len(samples) for samples in phase["samples_ms"]] == [15]
    assert not list(folder.results.glob("rounds/*"))
