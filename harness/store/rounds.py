"""Finished rounds of interleaved cases, kept on disk until their records are written.

``rounds/`` of a results folder holds one file for each unfinished case, named as its record will
be. It is replaced in one step after every round and removed once the record is written. A run
that is stopped in a round loses that round alone; the next run measures the missing rounds.
Rounds of two runs are joined only if nothing that a measurement depends on has changed between
them: code, versions, device and driver, on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from harness.escapes import printable
from harness.paths import ROOT
from harness.store import atomic
from harness.store.codec import decode, encode
from harness.store.record import SCHEMA as RECORD_SCHEMA
from harness.store.record import RecordStore, file_case
from harness.store.regular import read_regular
from harness.store.shape import RoundsShape

SCHEMA = 1

_CODE = ("harness", "kernels", "models", "parallel")

_NO_CONDITION = frozenset(
    {"git_revision", "revision_stated", "host_memory_bytes", "gpu_uuid", "gpu_uuids"}
    | {"cpu_affinity", "variables", "plugins"}
)
"""Left out of an environment: the code's hash says more than a revision, memory differs by a few
pages between hosts of one kind, a requeued job gets other CPUs and GPUs of its host, and a shell
sets other variables than the one before."""


_LOAD = frozenset({"root", "own_cpus", "other_cpus", "other_cpu_share"})
"""What is there of the host's load, if anything is."""


class Rounds(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The successful rounds of one case so far."""

    case_id: str
    num_rounds: int
    """How many the case has in all."""
    conditions: dict[str, Any]
    """See :func:`conditions`."""
    started_at: list[str] = []
    """When each round began, for all cases of its group."""
    turns_at: list[str] = []
    """When the case's own turn in each round began."""
    processes: list[int] = []
    """Which of the runs' worker processes measured each round."""
    wall_s: float = 0.0
    outcomes: list[list[dict[str, Any]]] = []
    """The outcomes of each round, in rank order."""
    schema: int = SCHEMA


class RoundStore:
    """The ``rounds`` folder; a process claims a case before it uses the case's rounds."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self.folder = records.results / "rounds"

    def keep(self, rounds: Rounds) -> None:
        """Replace the kept rounds of a case in one step. Raises OSError if there is no room."""
        self.folder.mkdir(exist_ok=True)
        atomic.replace(self._path(rounds.case_id), encode(rounds), sync=True)

    def find(self, case_id: str) -> Rounds | None:
        """The rounds kept for the case's next record. Raises ValueError if they cannot be read."""
        if not self.folder.exists():
            return None
        try:
            data, _ = read_regular(self._path(case_id))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(error.strerror) from error
        found = decode(
            data,
            Rounds,
            schema=SCHEMA,
            may_lack=frozenset({"processes", "turns_at"}),
            shape=RoundsShape,
        )
        _require_whole(found, case_id)
        return found

    def begun(self) -> set[str]:
        """The cases that have rounds for a record that is not written yet."""
        names = {path.name for path in self.folder.glob("*.json")}
        recorded = self._records.names().keys() if names else set()
        found = (file_case(name) for name in names - recorded)
        return {case_id for case_id, _ in filter(None, found)}

    def tidy(self) -> None:
        """Remove rounds whose record is written, also those that a crash has left."""
        with contextlib.suppress(OSError):
            paths = list(self.folder.iterdir())
            recorded = self._records.names() if paths else {}
            for path in paths:
                # Also what a crash has left of one that was being written aside.
                if path.name.partition(".json")[0] + ".json" in recorded:
                    path.unlink(missing_ok=True)

    def _path(self, case_id: str) -> Path:
        """The file of the case's rounds, named as its next record, so that attempts never mix."""
        attempts = self._records.attempts(case_id)
        return self.folder / self._records.path(case_id, (attempts or [0])[-1] + 1).name


def _require_whole(found: Rounds, case_id: str) -> None:
    """Raise ValueError unless every round is there, of every rank, and of this case."""
    if found.case_id != case_id:
        raise ValueError(f"they are of case {printable(found.case_id[:200])}")
    num_rounds = len(found.outcomes)
    times: list[Sequence[object]] = [found.started_at]
    times += [some for some in (found.turns_at, found.processes) if some]
    if any(len(some) != num_rounds for some in times):
        raise ValueError("their times are of another number of rounds")
    ranks = [[outcome["rank"] for outcome in outcomes] for outcomes in found.outcomes]
    if any(some != list(range(len(ranks[0]))) or not some for some in ranks):
        raise ValueError("their ranks are not the same in every round")
    for outcomes in found.outcomes:
        _require_alike(outcomes, found.outcomes[0][0])


def _require_alike(outcomes: list[dict[str, Any]], first: dict[str, Any]) -> None:
    """Raise ValueError unless the ranks' outcomes of one round can be joined with the first."""
    for outcome in outcomes:
        if outcome["status"] != "ok":
            raise ValueError("one of them did not end well")
        if outcome["clocks"].keys() != first["clocks"].keys():
            raise ValueError("their phases are not the same in every round")
        load = outcome.get("load", {})
        if load and not load.keys() >= _LOAD:
            raise ValueError("the host's load during one of them is not whole")
    for kind in ("samples_ms", "host_ms", "device_ms"):
        counts = [
            {name: len(samples) for name, samples in outcome.get(kind, {}).items()}
            for outcome in outcomes
        ]
        if any(some != counts[0] for some in counts):
            raise ValueError("their ranks have other numbers of samples")


def conditions(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The conditions under which rounds may be joined, from the ranks' environments."""
    found: dict[str, Any] = {"code": _code(), "schema of records": RECORD_SCHEMA}
    for rank, environment in enumerate(environments):
        of_rank = f" of rank {rank}" if len(environments) > 1 else ""
        found |= {
            f"{key}{of_rank}": value
            for key, value in environment.items()
            if key not in _NO_CONDITION
        }
    return found


def why_not_joined(
    kept: Rounds, num_rounds: int, num_ranks: int, now: dict[str, Any]
) -> str | None:
    """The first reason not to join rounds of an earlier run; None if there is none."""
    if any(len(outcomes) != num_ranks for outcomes in kept.outcomes):
        return f"they are of another number of ranks than {num_ranks}"
    if kept.num_rounds != num_rounds:
        return f"interleave was {kept.num_rounds} and is {num_rounds}"
    for key in dict.fromkeys([*now, *kept.conditions]):
        before, after = kept.conditions.get(key), now.get(key)
        if before != after:
            return f"{_short(key)} was {_short(before)} and is {_short(after)}"
    return None


def _short(value: object) -> str:
    return printable(str(value)[:200])


@cache
def _code() -> str:
    """A hash of all code that measures, which tells changes that a revision does not."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:10]
