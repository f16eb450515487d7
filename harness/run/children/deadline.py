"""Time limits that leave out the time in which this process was stopped."""

from __future__ import annotations

import time

POLL_S = 0.5
"""The longest wait between two looks at a deadline."""

STOPPED_S = 2.0
"""Looks that lie further apart were not missed by a process that ran: it was stopped (Ctrl-Z,
SIGSTOP, a frozen container), or its terminal held back what it wrote."""


class Deadline:
    """A time limit, to be looked at least every :data:`POLL_S` seconds.

    Nobody is to blame for the time between two looks that are much further apart, so the limit is
    extended by it. A suspended machine needs no such care on Linux, where the monotonic clock
    stands still meanwhile.
    """

    def __init__(self, limit_s: float) -> None:
        self._looked_at = time.monotonic()
        self._ends_at = self._looked_at + limit_s

    def left_s(self) -> float:
        """Seconds that are left; zero once the time is up."""
        now = time.monotonic()
        gap_s = now - self._looked_at
        if gap_s > STOPPED_S:
            self._ends_at += gap_s - POLL_S
        self._looked_at = now
        return max(0.0, self._ends_at - now)
