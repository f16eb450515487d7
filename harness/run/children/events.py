"""The protocol between a worker and its parent: events as lines of JSON, and their types.

A job has a number, which the events about it repeat. Whatever else arrives on the pipe is
:class:`Junk`, written by a backend or by what it has started, and the fault of that worker.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, get_type_hints

import msgspec

from harness.bench.outcome import Outcome
from harness.statuses import STATUSES

MAX_EVENT_BYTES = 32 * 2**20
"""The longest line. The results of a case with every sample of eight ranks take under one MiB."""

_BEGINNING = b'{"event": "'
"""Every line begins so; others are not waited for to end."""

_SHOWN_BYTES = 40

Stages = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Ready(msgspec.Struct, tag_field="event", tag="ready", forbid_unknown_fields=True):
    """The worker can take jobs."""

    environment: dict[str, Any]


class Began(msgspec.Struct, tag_field="event", tag="began", forbid_unknown_fields=True):
    """The worker has read a job."""

    job: int


class Stage(msgspec.Struct, tag_field="event", tag="stage", forbid_unknown_fields=True):
    """A job has reached a stage."""

    job: int
    stage: Stages


class Result(msgspec.Struct, tag_field="event", tag="result", forbid_unknown_fields=True):
    """How a job ended, on one rank or on all."""

    job: int
    outcomes: list[dict[str, Any]]
    healthy: bool
    """Whether the group can take another job."""


class Junk(msgspec.Struct, tag_field="event", tag="junk", forbid_unknown_fields=True):
    """Something that is no event; the worker cannot be trusted with another job."""

    reason: str


Event = Ready | Began | Stage | Result | Junk

Report = msgspec.defstruct(
    "Report", list(get_type_hints(Outcome).items()), forbid_unknown_fields=True
)
"""An outcome as it arrives: the fields of :class:`Outcome`, of its types."""


def typed(event: dict[str, Any]) -> Event:
    """The event in a line, as its type; :class:`Junk` if it is of none."""
    try:
        found = msgspec.convert(event, Event)
        if isinstance(found, Result):
            for outcome in found.outcomes:
                _require_report(outcome)
        if isinstance(found, Stage) and not found.stage.isprintable():
            raise ValueError("a stage with control characters")
    except ValueError as error:
        return Junk(f"wrote an event of another form ({str(error)[:200]})")
    return found


def _require_report(outcome: dict[str, Any]) -> None:
    msgspec.convert(outcome, Report)
    if outcome["status"] not in STATUSES:
        raise ValueError(f"status {outcome['status']!r}"[:60])


class EventReader:
    """Cuts what arrives on a pipe into events; after the first junk it takes nothing more."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._spoiled = False

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """The events that ``data`` completes, not yet typed; junk is one of them."""
        if self._spoiled:
            return []
        self._buffer += data
        events: list[dict[str, Any]] = []
        try:
            while (end := self._buffer.find(b"\n", self._searched)) >= 0:
                self._require_beginning()
                events.append(self._decoded(end))
                del self._buffer[: end + 1]
                self._searched = 0
            self._searched = len(self._buffer)
            self._require_beginning()
            if len(self._buffer) > MAX_EVENT_BYTES:
                raise ValueError(f"an event of over {MAX_EVENT_BYTES >> 20} MiB")
        except ValueError as error:
            self._spoiled = True
            self._buffer.clear()
            events.append({"event": "junk", "reason": f"wrote {error} to the pipe of its events"})
        return events

    def _require_beginning(self) -> None:
        length = min(len(self._buffer), len(_BEGINNING))
        if self._buffer[:length] != _BEGINNING[:length]:
            raise ValueError(self._shown())

    def _shown(self) -> str:
        """The beginning of what has come, up to the end of its line."""
        line, _, _ = bytes(self._buffer[:_SHOWN_BYTES]).partition(b"\n")
        return ascii(line)[1:]

    def _decoded(self, end: int) -> dict[str, Any]:
        if end > MAX_EVENT_BYTES:
            raise ValueError(f"an event of over {MAX_EVENT_BYTES >> 20} MiB")
        try:
            found = json.loads(self._buffer[:end])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a broken event, {self._shown()},") from error
        if not isinstance(found, dict):
            raise ValueError("a broken event")
        return found
