"""Whether a time is the device's, or that of a host that could not enqueue work fast enough.

Passes that the host had enqueued whole before the device began (``device_ms`` of a record) take
what the device needs. What the measured passes took longer, the device waited for its host: such
a time says nothing about kernels, and a faster host changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.stats import median, slowest_rank
from harness.store.record import Phase

NOTICEABLE_WAIT = 0.05
"""The share of a pass above which the device's wait for its host makes the pass host-bound."""

HOST_COLUMNS = ("host_ms", "device_ms", "device_waits", "host_bound")


@dataclass(kw_only=True, slots=True, frozen=True)
class HostTime:
    """The host's and the device's part in one phase of a case."""

    host_ms: float = math.nan
    """The host's time to enqueue a pass; NaN on a CPU and in records that do not hold it."""
    device_ms: float = math.nan
    """A pass on the device alone; NaN where none could be measured."""
    device_waits: float = math.nan
    """The share of a measured pass in which the device waited for its host."""
    host_bound: bool | None = None
    """Whether that share is noticeable; None if the record does not tell."""


def host_time(phase: Phase | None, device: str) -> HostTime:
    """The host's part in a measured phase; unknown without samples.

    The device never waits longer than the host works, so that higher clocks in the passes of
    ``device_ms`` do not pass for waiting. Without such passes (several ranks, or more kernels
    than the launch queue takes), a pass is host-bound if the host was busy all the time.
    """
    if phase is None or not any(phase.samples_ms):
        return HostTime()
    if device == "cpu":
        return HostTime(host_bound=False)
    if not any(phase.host_ms):
        return HostTime()
    pass_ms = median(slowest_rank(phase.samples_ms))
    host_ms = _unhindered(slowest_rank(phase.host_ms))
    if not any(phase.device_ms):
        return HostTime(host_ms=host_ms, host_bound=host_ms >= (1 - NOTICEABLE_WAIT) * pass_ms)
    device_ms = median(slowest_rank(phase.device_ms))
    waits = max(0.0, min(pass_ms - device_ms, host_ms)) / pass_ms
    return HostTime(
        host_ms=host_ms,
        device_ms=device_ms,
        device_waits=waits,
        host_bound=waits > NOTICEABLE_WAIT,
    )


def _unhindered(host_ms: list[float]) -> float:
    """The first quartile: behind many others, a pass may find the launch queue full."""
    return float(np.quantile(host_ms, 0.25))


def host_bound(rows: pd.DataFrame) -> pd.Series[bool]:
    """The rows of a frame that are known to be host-bound; they do not rank kernels."""
    if "host_bound" not in rows:
        return pd.Series(False, index=rows.index)
    return rows["host_bound"].map(is_true).astype(bool)


def is_true(known: Any) -> bool:
    """Whether a value of ``host_bound``, which may be unknown, says yes."""
    return known is not None and known == known and bool(known)
