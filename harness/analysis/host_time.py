"""Whether a time is the device's, or that of a host that could not enqueue work fast enough.

Passes that the host had enqueued whole before the device began (``device_ms`` of a record) take
what the device needs. What the measured passes took longer, the device waited for its host: such
a time says nothing about kernels, and a faster host changes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.stats import by_round, median, slowest_rank
from harness.store.record import Phase

NOTICEABLE_WAIT = 0.05
"""The share of a pass above which the device's wait for its host makes the pass host-bound."""

FASTEST, MOST = 0.1, 0.75
"""The share of passes that counts as the fastest, and the one that counts as most of them."""

FOLLOWS = 0.3
"""Rank correlation of passes with the host's times above which the host may have made them long."""

LEAST_PASSES = 20
"""Fewer passes tell no such correlation."""

HOST_COLUMNS = ("host_ms", "device_ms", "device_waits", "host_bound", "hindered")


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
    hindered: bool | None = None
    """Whether it is so in some round, however the median of all rounds may be: then what differs
    from round to round may be the host."""


def host_time(phase: Phase | None, device: str, rounds: Sequence[int] = ()) -> HostTime:
    """The host's part in a measured phase; unknown without samples.

    Args:
        rounds: passes of each round, for :attr:`HostTime.hindered`; one round if it is left out.

    The device never waits longer than the host works, so that higher clocks in the passes of
    ``device_ms`` do not pass for waiting. A host that was ahead (:func:`_is_ahead`) can make it
    wait no longer than in the fastest passes. Without passes of the device alone (several ranks, or
    more kernels than the launch queue takes), one is host-bound if the host was busy all the time.
    """
    if phase is None or not any(phase.samples_ms):
        return HostTime()
    if device == "cpu":
        return HostTime(host_bound=False, hindered=False)
    if not any(phase.host_ms):
        return HostTime()
    times_ms, hosts_ms = slowest_rank(phase.samples_ms), slowest_rank(phase.host_ms)
    device_ms = median(slowest_rank(phase.device_ms)) if any(phase.device_ms) else math.nan
    whole = _Waiting.of(times_ms, hosts_ms, device_ms)
    if whole.is_noticeable and _is_ahead(times_ms, hosts_ms, device_ms):
        fastest_ms = [float(np.quantile(times_ms, FASTEST))]
        whole = _Waiting.of(fastest_ms, hosts_ms, device_ms)
    times, hosts = by_round(times_ms, rounds), by_round(hosts_ms, rounds)
    parts = zip(times, hosts, strict=True) if len(times) == len(hosts) else ()
    return HostTime(
        host_ms=whole.host_ms,
        device_ms=device_ms,
        device_waits=whole.share,
        host_bound=whole.is_noticeable,
        hindered=whole.is_noticeable
        or any(
            _Waiting.of(time_ms, host_ms, device_ms).is_noticeable
            for time_ms, host_ms in parts
            if time_ms and host_ms
        ),
    )


def _is_ahead(times_ms: list[float], hosts_ms: list[float], device_ms: float) -> bool:
    """Whether the host was ahead of the device, so that what passes differ by is not its doing.

    Most passes were enqueued in less than the device alone takes, so that it can have waited only
    as they began, in the fastest ones as well; and a pass was no longer where the host took longer.
    So it is where a device that keeps to a limit of power is at lower clocks than in the few passes
    of ``device_ms``.
    """
    if math.isnan(device_ms) or not LEAST_PASSES <= len(times_ms) == len(hosts_ms):
        return False
    if np.quantile(hosts_ms, MOST) >= device_ms:
        return False
    of_time, of_host = (np.argsort(np.argsort(values)) for values in (times_ms, hosts_ms))
    return bool(np.corrcoef(of_time, of_host)[0, 1] < FOLLOWS)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Waiting:
    """What some passes say of the device's wait for its host."""

    host_ms: float
    share: float
    """NaN without passes of the device alone."""
    is_noticeable: bool

    @classmethod
    def of(cls, times_ms: list[float], hosts_ms: list[float], device_ms: float) -> _Waiting:
        pass_ms, host_ms = median(times_ms), _unhindered(hosts_ms)
        if math.isnan(device_ms):
            busy = host_ms >= (1 - NOTICEABLE_WAIT) * pass_ms
            return cls(host_ms=host_ms, share=math.nan, is_noticeable=busy)
        # A pass of no measurable time, as a foreign record may hold, waits for nothing.
        share = max(0.0, min(pass_ms - device_ms, host_ms)) / pass_ms if pass_ms else 0.0
        return cls(host_ms=host_ms, share=share, is_noticeable=share > NOTICEABLE_WAIT)


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
