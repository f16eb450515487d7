"""The predicted time of a training step: a median, an interval, and what the time is."""

from __future__ import annotations

from dataclasses import dataclass

WAITING = "waiting for the host"
"""The part in which a device waits for its host to launch kernels."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Part:
    """One part of a step's time."""

    name: str
    ms: float
    """Time that the step is longer for it."""
    hidden_ms: float = 0.0
    """Time that passes behind other parts."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepPrediction:
    """One rank's step. Parts sum to the median."""

    median_ms: float
    low_ms: float
    high_ms: float
    """The interval holds 90% of measurements."""
    tokens_per_s: float
    """Of all ranks together."""
    parts: tuple[Part, ...]
    phases_ms: dict[str, float]
    """Forward, backward and optimizer, as a step's record has them."""
    notes: tuple[str, ...] = ()
    """Why the interval is wide: what was extrapolated or stood in for something unmeasured."""

    @property
    def waiting_ms(self) -> float:
        """Time that the device waits for its host."""
        return sum(part.ms for part in self.parts if part.name == WAITING)
