"""Workers that measure nothing and say which turn they were given, and a folder for results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.run import runner
from harness.run.children.reply import Reply
from harness.run.rounds.interleaving import turns
from harness.run.rounds.options import RunOptions
from harness.run.runner import Runner
from harness.run.workers import worker_group
from harness.store.record import Record, RecordStore

ENVIRONMENT = {
    "torch": "2.11.0",
    "device_name": "NVIDIA H200",
    "driver": "580.1",
    "git_revision": "abc",
    "host_memory_bytes": 1000,
}

Turn = tuple[str, int]
"""A backend, and the number of its round from 0."""


@dataclass
class Host:
    """Where cases are measured, as a test sets it up, and what it was asked for."""

    random_order: bool = False
    environment: dict[str, Any] = field(default_factory=lambda: dict(ENVIRONMENT))
    turns: list[Turn] = field(default_factory=list)
    statuses: dict[Turn, str] = field(default_factory=dict)
    at: dict[Turn, Callable[[], None]] = field(default_factory=dict)
    """The event in the middle of a turn."""
    times: Callable[[Turn], list[float]] = lambda turn: [turn[1] + 0.25, turn[1] + 0.5]
    """The milliseconds that each pass of a turn takes."""
    further: dict[str, Callable[[Turn], dict[str, Any]]] = field(default_factory=dict)
    """Of a backend, what else its outcomes hold."""
    starts: list[str] = field(default_factory=list)
    """The folder of compiled code of each group of workers that was started."""
    ended: list[int] = field(default_factory=list)
    """The number of each group that was ended, from 1."""
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    """Case, round, and the number of the group that measured it."""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Have every runner measure with the host that is returned."""
    host = Host()

    class Group:
        def __init__(self, *, device: str, world_size: int, **options: Any) -> None:
            self.device, self.world_size = device, world_size
            assert Path(options["caches"]).is_dir()
            host.starts.append(options["caches"])
            self.number = len(host.starts)
            self.environments = [host.environment] * world_size

        def run(
            self,
            case: Case,
            *,
            rounds: int,
            round_index: int,
            until_decided: bool,
            timeout_s: float,
            on_stage: Callable[[str], None],
        ) -> Reply:
            turn = (case.attention.name, round_index)
            on_stage("measuring")
            host.at.get(turn, lambda: None)()
            host.turns.append(turn)
            host.asked.append((case.id, round_index, len(host.starts)))
            status = host.statuses.get(turn, "ok")
            values = {
                "status": status,
                "error": None if status == "ok" else {"message": status},
                "clocks": {"step": "host"},
                "samples_ms": {"step": host.times(turn)},
                "memory": {"source": "rss", "peak_rss_bytes": 100 + round_index},
                "check": {"errors": {"o": 0.1}, "tolerance": 1.0} if round_index == 0 else None,
                "compilation": {"first_pass_s": 1.0 + round_index, "recompilations": 0},
                "notes": {"loss": float(round_index)},
                "device_state": {"before": {"at": round_index}, "after": {"at": round_index}},
            }
            values |= host.further.get(case.attention.name, lambda turn: {})(turn)
            return Reply(outcomes=[values | {"rank": rank} for rank in range(case.world_size)])

        def close(self) -> None:
            host.ended.append(self.number)

    monkeypatch.setattr(worker_group, "WorkerGroup", Group)
    monkeypatch.setattr(
        runner,
        "turns",
        lambda cases, round_index: turns(cases, round_index) if host.random_order else cases,
    )
    return host


class Listener:
    """A progress that stops the run at a turn, as Ctrl-C does."""

    def __init__(self, stop_at: Turn | None = None, *, in_the_middle: bool = False) -> None:
        self.stages: list[str] = []
        self._stop_at = stop_at
        self._in_the_middle = in_the_middle
        self._num_started: dict[str, int] = {}
        self._stops = False

    def started(self, case: Case) -> None:
        name = case.attention.name
        number = self._num_started.get(name, 0)
        self._num_started[name] = number + 1
        self._stops = (name, number) == self._stop_at
        if self._stops and not self._in_the_middle:
            raise KeyboardInterrupt

    def stage(self, name: str) -> None:
        self.stages.append(name)
        if self._stops:
            raise KeyboardInterrupt

    def left_out(self, case: Case) -> None: ...

    def finished(self, record: Record, *, measured_now: bool) -> None: ...


@dataclass
class Bench:
    """One results folder."""

    path: Path
    attention: str = "naive,sdpa"
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.store = RecordStore(self.path)
        self.store.create()
        self.request = compose_request(
            ["model=tiny", f"attention={self.attention}", "device=cpu", f"results={self.path}"]
        )
        self.cases = [replace(case, device=self.device) for case in self.request.cases]

    def run(
        self, progress: Listener | None = None, *, rounds: int = 3, **further: Any
    ) -> dict[str, Record]:
        options = RunOptions(results=self.path, interleave=rounds, **further)
        Runner(options, self.store, progress or Listener()).run(self.cases)
        return self.records()

    def stop(self, at: Turn, **options: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.run(Listener(at), **options)

    def records(self) -> dict[str, Record]:
        found, problems = self.store.load()
        assert problems == []
        return {record.case["attention"]["name"]: record for record in found.values()}

    def kept(self) -> dict[str, int]:
        """The number of rounds on disk, by backend."""
        names = {case.id: case.attention.name for case in self.cases}
        found = [json.loads(path.read_text()) for path in self.files()]
        return {names[values["case_id"]]: len(values["outcomes"]) for values in found}

    def files(self) -> list[Path]:
        return sorted((self.path / "rounds").glob("*"))
