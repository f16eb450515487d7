"""Finished rounds of interleaved cases, kept on disk until their records are written.

``rounds/`` of a results folder holds, for each case that has begun and is not whole, one file
named as its record will be; it is replaced in one step after every round and goes away with the
record. A run that is stopped in a round loses that round alone: the next one goes on with the
rounds that are missing. Rounds are joined if nothing that a measurement depends on has changed
in between: code, versions, device and driver, on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from harness.paths import ROOT
from harness.store import atomic
from harness.store.codec import decode, encode
from harness.store.record import SCHEMA as RECORD_SCHEMA
from harness.store.record import RecordStore

SCHEMA = 1

_CODE = ("harness", "kernels", "models", "parallel")

_NO_CONDITION = frozenset({"git_revision", "host_memory_bytes"})
"""Of an environment: the code itself is compared, which a revision says less of, and hosts of one
kind have a few pages more or less."""


class Rounds(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The rounds of one case that have ended well so far."""

    case_id: str
    num_rounds: int
    """How many there are to be."""
    conditions: dict[str, Any]
    """See :func:`conditions`."""
    started_at: list[str] = []
    """Of each round, when the cases that take turns began with it."""
    wall_s: float = 0.0
    outcomes: list[list[dict[str, Any]]] = []
    """Of each round, what each rank observed, in rank order."""
    schema: int = SCHEMA


class RoundStore:
    """The ``rounds`` folder beside the records. Who reads or writes a case has claimed it."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self.folder = records.results / "rounds"

    def keep(self, rounds: Rounds) -> None:
        """Replace what is kept of the case, in one step. Raises OSError if it does not fit."""
        self.folder.mkdir(exist_ok=True)
        atomic.replace(self._path(rounds.case_id), encode(rounds), sync=True)

    def find(self, case_id: str) -> Rounds | None:
        """What is kept for the case's next record. Raises ValueError if it cannot be read."""
        if not self.folder.exists():
            return None
        try:
            return decode(self._path(case_id).read_bytes(), Rounds, schema=SCHEMA)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(error.strerror) from error

    def tidy(self) -> None:
        """Remove rounds whose record is written; a crash may have left some of those."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                # Also what a crash has left of one that was being written aside.
                record = path.name.partition(".json")[0] + ".json"
                if (self._records.folder / record).exists():
                    path.unlink(missing_ok=True)

    def _path(self, case_id: str) -> Path:
        """Named as the next record, so that rounds of one attempt never join another."""
        attempts = self._records.attempts(case_id)
        return self.folder / self._records.path(case_id, (attempts or [0])[-1] + 1).name


def conditions(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What must be equal for rounds to be of one measurement, from the ranks' environments."""
    found: dict[str, Any] = {"code": _code(), "schema of records": RECORD_SCHEMA}
    for rank, environment in enumerate(environments):
        of_rank = f" of rank {rank}" if len(environments) > 1 else ""
        found |= {
            f"{key}{of_rank}": value
            for key, value in environment.items()
            if key not in _NO_CONDITION
        }
    return found


def why_not_joined(kept: Rounds, num_rounds: int, now: dict[str, Any]) -> str | None:
    """The first thing that keeps rounds of an earlier run from being joined; None if nothing."""
    if kept.num_rounds != num_rounds:
        return f"interleave was {kept.num_rounds} and is {num_rounds}"
    for key in dict.fromkeys([*now, *kept.conditions]):
        before, after = kept.conditions.get(key), now.get(key)
        if before != after:
            return f"{key} was {before} and is {after}"
    return None


@cache
def _code() -> str:
    """A hash of all code that measures: two revisions may share it, and one with changes not."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:10]
