"""Bytes of tensors that are alive at once, by name, and the moment when they are most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Ledger:
    """What one rank holds, while a pass allocates and frees; all sizes in bytes."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}
        self.peak: dict[str, float] = {}
        """The parts at the peak so far, without those of no size."""

    def hold(self, **sizes: float) -> None:
        """Set parts to these sizes; a part that existed is replaced."""
        self._held |= sizes
        if sum(self._held.values()) > sum(self.peak.values()):
            self.peak = {name: size for name, size in self._held.items() if size}

    def add(self, **sizes: float) -> None:
        """Let parts grow by these sizes."""
        self.hold(**{name: self._held.get(name, 0.0) + size for name, size in sizes.items()})

    def free(self, *names: str) -> None:
        for name in names:
            self._held.pop(name, None)

    @contextmanager
    def during(self, **sizes: float) -> Iterator[None]:
        """Hold further bytes of these parts for a while."""
        self.add(**sizes)
        yield
        self.add(**{name: -size for name, size in sizes.items()})
