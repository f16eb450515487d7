"""From kernels and launches to a step: the larger of host and device, and what is hidden.

The host enqueues phases one after the other and may run ahead of the device, which executes them
in order. A step that begins with both idle ends when the device has executed its last kernel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.forecast.prediction import WAITING, Part, StepPrediction

Z90 = 1.645
"""Standard errors on either side of an interval of 90%."""

STEP_ERROR = 0.035
"""Standard log error of a step whose kernels are known: hosts, devices, and run to run."""

STRAGGLERS = "waiting for the slowest host"


@dataclass(kw_only=True, slots=True, frozen=True)
class Piece:
    """Kernels of a pass without attention's."""

    parts: Mapping[str, float]
    errors: Mapping[str, float]
    launches: float
    notes: set[str] = field(default_factory=set)


@dataclass(kw_only=True, slots=True, frozen=True)
class Phase:
    """One phase of a step on one rank."""

    name: str
    parts: Mapping[str, float]
    """Milliseconds of the device."""
    errors: Mapping[str, float]
    """Standard error of each."""
    launches: float
    enqueued: float
    """Launches' worth of time on the host, which operations that do more than launch exceed; of an
    optimizer its tensors."""
    last_ms: float = 0.0
    """Of the device's time, what its last few kernels take: the head and the loss of a forward
    pass, which run while the host enqueues the next phase already, and all of an optimizer's,
    which one call launches when it has listed every tensor."""

    @property
    def device_ms(self) -> float:
        return sum(self.parts.values())

    def joined(self, other: Phase) -> Phase:
        """Both, as one phase."""
        return Phase(
            name=self.name,
            parts=_sum(self.parts, other.parts),
            errors=_sum(self.errors, other.errors),
            launches=self.launches + other.launches,
            enqueued=self.enqueued + other.enqueued,
            last_ms=self.last_ms,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Exchange:
    """Communication of a step: what it adds to it, and what it hides behind computing."""

    name: str
    phase: str
    """The phase that it makes longer."""
    visible_ms: float
    hidden_ms: float
    error_ms: float
    launches: float = 0.0
    follows: bool = False
    """Whether it begins when the phase has ended, rather than beside its kernels."""
    note: str | None = None


def predict(
    phases: Sequence[Phase],
    exchanges: Sequence[Exchange],
    host_us: Mapping[str, float],
    host_error: float,
    tokens: float,
    notes: set[str],
    straggling: tuple[float, float] = (0.0, 0.0),
) -> StepPrediction:
    """One step from its phases.

    Args:
        straggling: what the slowest host adds to the step, as a fraction, and its deviation.
    """
    parts: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)
    errors: dict[str, float] = defaultdict(float)
    ends: dict[str, float] = {}
    host_end = device_end = 0.0
    for phase in phases:
        mine = [item for item in exchanges if item.phase == phase.name]
        during = [item for item in mine if not item.follows]
        begin = device_end
        started = max(device_end, host_end)
        launches = phase.enqueued + sum(item.launches for item in during)
        host_end += host_us[phase.name] * launches / 1e3
        busy = phase.device_ms + sum(item.visible_ms for item in during)
        device_end = max(started + busy, host_end + phase.last_ms)
        for item in mine:
            if item.follows:
                host_end += host_us[phase.name] * item.launches / 1e3
                device_end = max(device_end + item.visible_ms, host_end)
        waited = device_end - begin - phase.device_ms - sum(item.visible_ms for item in mine)
        for name, ms in phase.parts.items():
            parts[name] += ms
            errors[name] += phase.errors[name]
        for item in mine:
            parts[item.name] += item.visible_ms
            hidden[item.name] += item.hidden_ms
            errors[item.name] += item.error_ms
            if item.note is not None:
                notes = notes | {item.note}
        parts[WAITING] += waited
        ends[phase.name] = device_end - begin
    waits = parts.pop(WAITING)
    if waits > 1e-3 * device_end:
        parts[WAITING] = waits
    excess, deviation = straggling
    if excess:
        parts[STRAGGLERS] = excess * device_end
        errors[STRAGGLERS] = (deviation + excess / 2) * device_end
        device_end *= 1 + excess
    error = step_error(device_end, errors.values(), waits, host_end, host_error)
    return StepPrediction(
        median_ms=device_end,
        low_ms=device_end * math.exp(-Z90 * error),
        high_ms=device_end * math.exp(Z90 * error),
        tokens_per_s=tokens / device_end * 1e3,
        parts=tuple(
            Part(name=name, ms=ms, hidden_ms=hidden[name])
            for name, ms in sorted(parts.items(), key=lambda item: -item[1])
        ),
        phases_ms=ends,
        notes=tuple(sorted(notes)),
    )


def step_error(
    total: float,
    errors: object,
    waits: float,
    host_ms: float,
    host_error: float,
) -> float:
    """Standard log error of a step; parts err independently, a part's operations together."""
    squares = sum(error**2 for error in errors) / total**2  # type: ignore[attr-defined]
    if waits > 0.02 * total or host_ms > 0.85 * total:
        # The host may be ahead or behind: as much of its error as it may matter.
        squares += (host_error * min(1.0, host_ms / total)) ** 2
    return math.sqrt(squares + STEP_ERROR**2)


def _sum(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}
