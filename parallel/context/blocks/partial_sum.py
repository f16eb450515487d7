"""Results to a few rows of which more is added: those rows in float32, the others as they come.

Under a window most rows of a rank get their result from one kernel call. To sum all of them in
float32 would write and read each several times, which takes as long as a third of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class PartialSum:
    """A result [B, H, S, D] whose rows in ``span``, along S, are summed in float32.

    The result is changed in place, in the end.
    """

    def __init__(self, value: Tensor, span: slice) -> None:
        self._value, self._span = value, span
        self._wide = value[:, :, span].float()

    def wide(self, rows: slice) -> Tensor:
        """The float32 sum of some rows of the span."""
        start = self._span.start
        return self._wide[:, :, rows.start - start : rows.stop - start]

    def take_anew(self, rows: slice) -> None:
        """Begin the sum of rows with the result again, as far as they are in the span."""
        start, stop = max(rows.start, self._span.start), min(rows.stop, self._span.stop)
        if start < stop:
            rows = slice(start, stop)
            self.wide(rows).copy_(self._value[:, :, rows])

    def add(self, rows: Sequence[slice], part: Tensor) -> None:
        """Add to rows of the span, one slice after another."""
        sizes = [one.stop - one.start for one in rows]
        for one, own in zip(rows, part.split(sizes, dim=2), strict=True):
            self.wide(one).add_(own)

    def result(self) -> Tensor:
        """The whole, in its own dtype."""
        if self._wide.numel():
            self._value[:, :, self._span] = self._wide
        return self._value
