"""The messages between a leader and an agent, by direction."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Text = Annotated[str, msgspec.Meta(max_length=255)]

Name = Annotated[str, msgspec.Meta(max_length=255, pattern="^[ -~]*$")]
"""Printed as it is, and so without control characters."""


class ToLeader(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="message"):
    """A message of an agent."""


class Hello(ToLeader, kw_only=True, tag="hello"):
    """The first one: who the agent is."""

    run: Text
    """``launcher.rdzv_id``, or the task of a job."""
    rank: Annotated[int, msgspec.Meta(ge=0)]
    host: Name
    version: Name
    time_s: float
    """The host's clock: seconds since the epoch."""


class Event(ToLeader, kw_only=True, tag="event"):
    """An event of the worker."""

    event: dict[str, Any]


class Ended(ToLeader, kw_only=True, tag="ended"):
    """The worker has ended."""

    code: int | None
    log: list[str]


class LogLines(ToLeader, kw_only=True, tag="log"):
    """The last lines that the worker printed."""

    log: list[str]


class Killed(ToLeader, kw_only=True, tag="killed"):
    """The worker and its children are gone."""


class ToAgent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="message"):
    """A message of the leader."""


class Welcome(ToAgent, kw_only=True, tag="welcome"):
    """The agent has joined."""


class Refused(ToAgent, kw_only=True, tag="refused"):
    """The agent cannot join."""

    reason: str


class Start(ToAgent, kw_only=True, tag="start"):
    """Start a worker."""

    start: dict[str, Any]
    """The values of a :class:`harness.run.children.rank.RankStart`."""


class Job(ToAgent, kw_only=True, tag="job"):
    """A line for the worker."""

    line: str


class WantLog(ToAgent, kw_only=True, tag="want_log"):
    """Send the worker's last lines."""


class Kill(ToAgent, kw_only=True, tag="kill"):
    """Kill the worker."""


FROM_AGENT = Hello | Event | Ended | LogLines | Killed
FROM_LEADER = Welcome | Refused | Start | Job | WantLog | Kill
