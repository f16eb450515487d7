"""Builds a case's record from what its ranks report, round by round."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from harness.cases.case import Case
from harness.cases.source import source_of
from harness.gate.findings import join_checks
from harness.run.children.reply import Reply
from harness.statuses import STATUSES
from harness.store.record import Phase, Record, Round
from harness.store.rounds import Rounds, conditions


class RecordBuilder:
    """Collects the rounds of one case and joins them into its record."""

    def __init__(self, case: Case, num_rounds: int) -> None:
        self.case = case
        self.ended = False
        self.recorded = False
        self.stopped = ""
        """Why no further rounds were measured; see :attr:`Record.stopped`."""
        self.last_wall_s = 0.0
        """How long the last round took."""
        self.environments: list[dict[str, Any]] = []
        self._num_rounds = num_rounds
        self._num_taken_up = 0
        self._started_at: list[str] = []
        self._turns_at: list[str] = []
        self._processes: list[int] = []
        self._wall_s = 0.0
        self._rounds: list[list[dict[str, Any]]] = []
        self._status = "ok"
        self._error: dict[str, Any] | None = None
        # Read now, and not after an edit that comes while the case runs.
        self._values = case.to_dict()
        source_of(self._values, {})

    @property
    def num_finished(self) -> int:
        return len(self._rounds)

    @property
    def processes(self) -> list[int]:
        """Which of the run's worker processes measured each round."""
        return self._processes

    @property
    def is_taken_up(self) -> bool:
        """Whether its last round is of an earlier run."""
        return self.num_finished == self._num_taken_up > 0

    @property
    def again_s(self) -> float:
        """How long the last round took without its first pass, which compiles, and its check."""
        once_s = [
            ((outcome.get("compilation") or {}).get("first_pass_s") or 0.0)
            + outcome.get("checking_s", 0.0)
            for outcome in self._rounds[-1]
        ]
        return self.last_wall_s - max(once_s, default=0.0)

    def rounds_ms(self, phase: str) -> list[list[float]]:
        """By round, the times of a phase on the slowest rank; empty where it was not measured."""
        per_rank = [
            [outcome["samples_ms"].get(phase, []) for outcome in outcomes]
            for outcomes in self._rounds
        ]
        return [[max(times) for times in zip(*ranks, strict=False)] for ranks in per_rank]

    def loads(self) -> list[dict[str, Any]]:
        """What else kept the host busy, by round and rank."""
        return [load for outcomes in self._rounds for load in self._loads(outcomes)]

    def phase(self, name: str) -> Phase:
        """A phase of all finished rounds together, as the record will hold it."""
        return _joined(name, self._rounds)

    def take_up(self, kept: Rounds) -> None:
        """Start from the finished rounds of an earlier run."""
        self._num_taken_up = len(kept.outcomes)
        self._rounds, self._started_at = kept.outcomes, kept.started_at
        # Rounds from before turns had times of their own began with their group's.
        self._turns_at = [*kept.turns_at] or [*kept.started_at]
        self._processes = list(kept.processes)
        self._wall_s = kept.wall_s
        self.last_wall_s = kept.wall_s / max(1, len(kept.outcomes))

    def to_rounds(self) -> Rounds:
        """The finished rounds, for the next run to start from."""
        return Rounds(
            case_id=self.case.id,
            num_rounds=self._num_rounds,
            conditions=conditions(self.environments),
            started_at=self._started_at,
            turns_at=self._turns_at,
            processes=self._processes,
            wall_s=self._wall_s,
            outcomes=self._rounds,
        )

    def begin_round(self, began_at: str) -> None:
        """Note the beginning of a round of the case's group, and of the case's turn in it: now."""
        self._started_at.append(began_at)
        self._turns_at.append(datetime.now(UTC).isoformat(timespec="milliseconds"))

    def add(self, reply: Reply, log_tail: str, wall_s: float, process: int) -> None:
        """Add one round; a round that is not ok ends the case.

        Args:
            process: which of the run's worker groups measured it; see :class:`Round`.
        """
        self._processes.append(process)
        outcomes = sorted(reply.outcomes, key=lambda outcome: outcome["rank"])
        self._rounds.append(outcomes)
        self._wall_s += wall_s
        self.last_wall_s = wall_s
        if not reply.healthy and reply.fault is None:
            # The first rank to give up knows the cause; the others fail because it has gone.
            outcomes = [item for item in reply.outcomes if item["status"] != "ok"][:1]
        self._status = max((item["status"] for item in outcomes), key=STATUSES.index, default="ok")
        if self._status != "ok":
            self._error = _first_error(outcomes, self._status)
        if reply.fault is not None or (not reply.healthy and not outcomes):
            self._status = reply.fault or "failed"
            self._error = {"message": reply.message, "log": log_tail}
        self.ended = self._status != "ok"

    def give_up(self, status: str, message: str) -> None:
        """End the case with a status that no rank reported."""
        self._status, self._error = status, {"message": message}
        self.ended = True

    def to_record(self) -> Record:
        case = self.case
        record = Record(
            case_id=case.id,
            case=self._values,
            status=self._status,
            error=self._error,
            work={name: asdict(work) for name, work in case.task.work(case).items()},
            environment=dict(self.environments[0]) if self.environments else {},
            started_at=self._started_at[0],
            wall_s=self._wall_s,
            stopped=self.stopped,
        )
        record.notes["predicted_memory"] = case.task.predicted_memory(case)
        before_backward = case.task.predicted_before_backward(case)
        if before_backward is not None:
            record.notes["predicted_before_backward"] = before_backward
        rounds = max(self._num_rounds, len(self._rounds))
        if rounds > 1:
            record.notes["interleaved_rounds"] = rounds
            record.notes["rounds_started_at"] = self._started_at
        if self._num_taken_up:
            record.notes["resumed_rounds"] = self._num_taken_up
        complete = [outcomes for outcomes in self._rounds if len(outcomes) == case.world_size]
        if complete:
            _add_measurements(record, complete, self._num_rounds)
            record.round_states = [
                Round(started_at=turn_at, process=process, ranks=self._states(outcomes))
                for turn_at, process, outcomes in zip(
                    self._turns_at, self._processes, self._rounds, strict=False
                )
                if len(outcomes) == case.world_size
            ]
        record.environment |= {"libraries": record.notes.pop("libraries", {})}
        if len(self.environments) > 1:
            record.environment["ranks"] = [
                {key: environment.get(key) for key in _OF_A_RANK}
                for environment in self.environments
            ]
        record.source = source_of(self._values, record.notes)
        return record

    def _states(self, outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The device's state and the host's load around one round, by rank."""
        return [
            outcome["device_state"] | {"load": load}
            for outcome, load in zip(outcomes, self._loads(outcomes), strict=True)
        ]

    def _loads(self, outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What other processes than this run's took of the host during one round, by rank."""
        hosts = [
            (environment.get("host"), environment.get("boot_id"))
            for environment in self.environments
        ]
        loads = [dict(outcome.get("load", {})) for outcome in outcomes]
        for load, host in zip(loads, hosts, strict=False):
            own = {
                other["root"]: other["own_cpus"]
                for other, its_host in zip(loads, hosts, strict=False)
                if other and its_host == host
            }
            # Ranks that another process has started are not others.
            further = sum(cpus for root, cpus in own.items() if root != load.get("root"))
            if load and further:
                others = max(0.0, load["other_cpus"] - further)
                load["other_cpu_share"] *= others / load["other_cpus"] if others else 0.0
                load["other_cpus"] = others
        return loads


def _add_measurements(
    record: Record, complete: list[list[dict[str, Any]]], num_rounds: int
) -> None:
    """Join the rounds that all ranks completed: samples in a row, the highest peak, last notes.

    Args:
        num_rounds: the rounds that every case has. The last of them is noted; further ones
            measure times alone.
    """
    first, last = complete[0], complete[-1]
    ranks = range(len(first))
    record.check = join_checks(outcome["check"] for outcomes in complete for outcome in outcomes)
    record.checking_s = [
        round(max(outcome.get("checking_s", 0.0) for outcome in outcomes), 3)
        for outcomes in complete
    ]
    record.compilation = _worst_compilation(complete)
    record.memory = [
        _merge_max([outcomes[rank]["memory"] for outcomes in complete]) for rank in ranks
    ]
    record.device_state = [
        {
            "before": first[rank]["device_state"].get("before", {}),
            "after": last[rank]["device_state"].get("after", {}),
        }
        for rank in ranks
    ]
    record.notes |= complete[:num_rounds][-1][0]["notes"]
    for name in first[0]["clocks"]:
        record.phases[name] = _joined(name, complete)
        record.rounds = [len(outcomes[0]["samples_ms"].get(name, [])) for outcomes in complete]


def _joined(name: str, rounds: list[list[dict[str, Any]]]) -> Phase:
    """A phase of several rounds, whose samples follow each other."""
    first = rounds[0]
    series = {
        kind: [
            [sample for outcomes in rounds for sample in outcomes[rank].get(kind, {}).get(name, [])]
            for rank in range(len(first))
        ]
        for kind in ("samples_ms", "host_ms", "device_ms")
    }
    found = {kind: per_rank for kind, per_rank in series.items() if any(per_rank)}
    return Phase(clock=first[0]["clocks"].get(name, "host"), **{"samples_ms": [], **found})


_OF_A_RANK = ("host", "boot_id", "gpu_uuid", "cpu_affinity", "num_threads")
"""What may differ between the ranks of a case, and is recorded for each."""


def _first_error(outcomes: list[dict[str, Any]], status: str) -> dict[str, Any] | None:
    if status == "unsupported" and all(item["status"] == status for item in outcomes):
        # The same reason on every rank; none of them is to blame.
        return dict(outcomes[0]["error"])
    for outcome in outcomes:
        if outcome["status"] == status and outcome["error"]:
            error = dict(outcome["error"])
            if len(outcomes) > 1 or "vote" in outcome["notes"]:
                error["message"] = f"rank {outcome['rank']}: {error['message']}"
            return error
    return None


def _merge_max(per_round: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for values in per_round:
        for key, value in values.items():
            old = merged.get(key)
            numbers = isinstance(old, int | float) and isinstance(value, int | float)
            merged[key] = max(old, value) if numbers else value
    return merged


def _worst_compilation(complete: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The first round's compile times, and the most recompilations of any round."""
    merged = _merge_max([outcome["compilation"] for outcome in complete[0]])
    merged["recompilations"] = max(
        outcome["compilation"].get("recompilations", 0)
        for outcomes in complete
        for outcome in outcomes
    )
    return merged
