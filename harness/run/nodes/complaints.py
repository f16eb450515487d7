"""Lines on standard error, of which a flood is counted and not printed."""

from __future__ import annotations

import time

from harness.printing import warn

AT_ONCE = 5
"""Lines that are printed as they come."""

APART_S = 10.0
"""Between further lines, each of which says how many it stands for."""


class Complaints:
    """Prints the first lines, and one now and then afterwards."""

    def __init__(self) -> None:
        self._num_printed = 0
        self._num_held = 0
        self._next_at = 0.0

    def add(self, line: str) -> None:
        now = time.monotonic()
        if self._num_printed >= AT_ONCE and now < self._next_at:
            self._num_held += 1
            return
        further = f" (and {self._num_held} more before it)" if self._num_held else ""
        warn(f"{line}{further}")
        self._num_printed += 1
        self._num_held = 0
        self._next_at = now + APART_S

    def close(self) -> None:
        """Say how many were held back."""
        if self._num_held:
            warn(f"{self._num_held} more were dropped")
        self._num_held = 0
