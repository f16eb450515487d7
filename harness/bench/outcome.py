"""One rank's observations of one case, and the exceptions that end a case early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BUSY_CPUS = 0.10
"""Share of the host's CPUs that other processes may use before it counts as busy."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One rank's observations of one case; they become part of a record."""

    rank: int
    status: str = "ok"
    error: dict[str, Any] | None = None
    clocks: dict[str, str] = field(default_factory=dict)
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    host_ms: dict[str, list[float]] = field(default_factory=dict)
    """Of each phase, the host's time to enqueue the same passes; CUDA only."""
    device_ms: dict[str, list[float]] = field(default_factory=dict)
    """Of each phase, passes that the host had enqueued before the device began; CUDA only."""
    memory: dict[str, Any] = field(default_factory=dict)
    check: dict[str, Any] | None = None
    checking_s: float = 0.0
    """Seconds of the numeric gate in this round, without what its calls compiled."""
    compilation: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    device_state: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    """What else kept the host and the device busy during the round."""


class PeerFailed(Exception):
    """Another rank of this case failed; its own outcome says how."""


class PeerSilent(Exception):
    """Another rank did not answer a vote in time: it is stuck or gone."""


class WrongResult(Exception):
    """The numeric check failed; the message says by how much."""
