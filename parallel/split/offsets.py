"""Lengths of sequences, read once from each tensor of offsets."""

from __future__ import annotations

from torch import Tensor

from parallel.split import checks
from parallel.split.checks import Offsets

_KEPT = 16
"""Tensors of offsets; the layers of a model share that of a batch."""


class KnownLengths:
    """Lengths by the identity of their offsets, since to read these waits for the device."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[Tensor, tuple[int, ...]]] = {}

    def of(self, offsets: Offsets, name: str) -> tuple[int, ...]:
        """Lengths of the sequences; ValueError if these are no offsets."""
        if not isinstance(offsets, Tensor) or offsets.is_inference():
            return checks.lengths_of(offsets, name)
        key = (id(offsets), offsets._version)
        if key not in self._found:
            lengths = checks.lengths_of(offsets, name)
            if len(self._found) >= _KEPT:
                self._found.pop(next(iter(self._found)))
            # The tensor stays alive with what is known of it, so that no other gets its id.
            self._found[key] = (offsets, lengths)
        return self._found[key][1]


LENGTHS = KnownLengths()
